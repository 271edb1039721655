// The inner kernel of every product: some rows times one panel.
//
// A panel is K rows of P = 2 vectors: the weights of P outputs, floats, bfloat16 or 8-bit
// integers, stored in the order in which the kernel reads them. The kernel keeps M rows of P
// results in registers and reads each element of the panel once per M rows (register blocking:
// Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
#pragma once

#include "simd.h"

#include <type_traits>

namespace fairlead {

constexpr int P = 2 * W;
// Rows in registers: 2 vectors of results each, of 32 registers or of 16.
constexpr int MAX_ROWS = W == 16 ? 14 : 6;

// Rows that a block has at most, where x has so many columns: the numbers of all rows for one k are
// read together, and lines a multiple of 4096 bytes apart have one place in a first-level cache, of
// which the smallest keep eight.
inline int most_rows(int64_t x_stride) {
  int64_t places = 1;
  for (int64_t step = x_stride * 4; places < 64 && step * places % 4096 != 0;) places *= 2;
  return places > 1 || MAX_ROWS < 8 ? MAX_ROWS : 7;
}

// How many bytes before its use a weight is fetched from memory when it is multiplied by so few
// rows that registers hold all their results. As measured (benchmarks/README.md): with fewer bytes
// memory answers too late, with more the lines push others out of the cache.
constexpr int bytes_ahead(int rows) { return (rows < 6 ? 6 : rows) << 10; }

// What to fetch into the second-level cache meanwhile: `lines` cache lines every 4 steps of k.
struct Fetch {
  const char* at = nullptr;
  int lines = 0;
};

// With WIDENS the panel is left in `wide` as floats.
template <class T, bool WIDENS, int M>
void product_block(const float* x, int64_t x_stride, const T* panel, int k_count, float* y,
                   int64_t y_stride, bool accumulate, Fetch fetch, float* wide) {
  Vec sums[M][2];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++) {
    sums[i][0] = accumulate ? load(y + i * y_stride) : Vec{};
    sums[i][1] = accumulate ? load(y + i * y_stride + W) : Vec{};
  }
  const auto step = [&](int k) __attribute__((always_inline)) {
    const Vec low = load(panel), high = load(panel + W);
    // The hardware fetches the panel from memory; this brings it from the second-level cache.
    __builtin_prefetch(panel + 16 * W, 0, 3);
    if (P * sizeof(T) > 64) __builtin_prefetch(panel + 17 * W, 0, 3);
    panel += P;
    if constexpr (WIDENS) {
      store(wide, low);
      store(wide + W, high);
      wide += P;
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      const Vec factor = splat(x[i * x_stride + k]);
      sums[i][0] += factor * low;
      sums[i][1] += factor * high;
    }
  };
  int k = 0;
  for (; k + 4 <= k_count; k += 4) {
    for (int line = 0; line < fetch.lines; line++, fetch.at += 64) {
      __builtin_prefetch(fetch.at, 0, 2);
    }
    step(k);
    step(k + 1);
    step(k + 2);
    step(k + 3);
  }
  for (; k < k_count; k++) step(k);
#pragma GCC unroll 16
  for (int i = 0; i < M; i++) {
    store(y + i * y_stride, sums[i][0]);
    store(y + i * y_stride + W, sums[i][1]);
  }
}

template <class T>
using Block = void (*)(const float*, int64_t, const T*, int, float*, int64_t, bool, Fetch, float*);

template <class T, bool WIDENS, int... I>
constexpr Block<T> block_of(int rows, std::integer_sequence<int, I...>) {
  constexpr Block<T> blocks[] = {product_block<T, WIDENS, I + 1>...};
  return blocks[rows - 1];
}

// y [rows, P] = x [rows, k_count] · panel, or += with `accumulate`. Rows are spread evenly over
// blocks. With `next`, the panel that is needed after this one, several blocks fetch it meanwhile;
// one fetches its own panel, a little ahead, and the beginning of the next. With `wide`, memory for
// a panel of bfloat16 as floats, the first of several blocks widens it for all.
template <class T>
inline void product(int rows, const float* x, int64_t x_stride, const T* panel, int k_count,
                    float* y, int64_t y_stride, bool accumulate, const T* next = nullptr,
                    float* wide = nullptr) {
  const int most = most_rows(x_stride), blocks = (rows + most - 1) / most;
  const int lines_of_4 = (4 * P * int(sizeof(T)) + 63) / 64;
  Fetch fetch;
  if (next != nullptr) {
    const char* soon = reinterpret_cast<const char*>(next);
    if (blocks == 1) soon = reinterpret_cast<const char*>(panel) + bytes_ahead(rows);
    fetch = {soon, (lines_of_4 - 1) / blocks + 1};
  }
  const char* end = fetch.at + size_t(k_count) * P * sizeof(T);
  const bool widens = std::is_same_v<T, bfloat16> && wide != nullptr && blocks > 1;
  for (int block = 0, row = 0; block < blocks; block++) {
    const int count = (rows - row + blocks - block - 1) / (blocks - block);
    if (fetch.at >= end) fetch.lines = 0;
    const auto multiply = [&](auto multiply_rows, const auto* numbers) {
      multiply_rows(x + row * x_stride, x_stride, numbers, k_count, y + row * y_stride, y_stride,
                    accumulate, fetch, wide);
    };
    constexpr std::make_integer_sequence<int, MAX_ROWS> all{};
    if (!widens) {
      multiply(block_of<T, false>(count, all), panel);
    } else if constexpr (std::is_same_v<T, bfloat16>) {
      if (block == 0) {
        multiply(block_of<T, true>(count, all), panel);
      } else {
        multiply(block_of<float, false>(count, all), wide);
      }
    }
    fetch.at += size_t(fetch.lines) * 64 * (k_count / 4);
    row += count;
  }
}

}  // namespace fairlead
