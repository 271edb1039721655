// Linear layers on packed weights: packing, and x · weightᵀ + bias.
#include "linear.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "export.h"

using namespace fairlead;

// Outputs per panel: rows of a packed weight are padded to a multiple of it.
FL_EXPORT int fairlead_panel_width() { return P; }

// Asks for large pages behind `bytes` of memory that is not written yet: a weight is read at the
// speed of memory only if the addresses' translations are cached.
FL_EXPORT void fairlead_use_large_pages(void* data, int64_t bytes) {
  const uintptr_t page = 2 << 20, from = (uintptr_t(data) + page - 1) / page * page;
  const uintptr_t to = (uintptr_t(data) + uintptr_t(bytes)) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
}

// Gives the whole pages in `bytes` of memory back to the system. They are zeros afterwards, or again
// what a file has that they are privately mapped from.
FL_EXPORT void fairlead_give_back(void* data, int64_t bytes) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t from = (uintptr_t(data) + page - 1) / page * page;
  const uintptr_t to = (uintptr_t(data) + uintptr_t(bytes)) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

namespace {

void put(float value, float* out) { *out = value; }
void put(float value, bfloat16* out) { from_float(value, out); }
void put(int8_t value, int8_t* out) { *out = value; }

// Numbers of a row that lie together: four as products of digits read them, two as those of pairs.
template <class T, int COUNT>
struct Group {
  T of[COUNT];
};
template <class T, int COUNT>
void put(Group<T, COUNT> value, Group<T, COUNT>* out) {
  *out = value;
}

// Columns that are packed at a time: one cache line of a row of floats.
constexpr int TILE = 16;

// Puts the elements value(row, k) of rows [rows) and columns [columns) into panels, at rows
// `first` …: by tiles, which are read along their rows and written along the panel's, so that
// either is read and written once, whole lines of it.
template <class T, class Value>
void pack(T* packed, Value value, int64_t rows, int64_t columns, int64_t first, int threads) {
  const int64_t panel = first / P, panels = (first + rows - 1) / P + 1 - panel;
  run(threads, [&](Team& team) {
    team.share(int(panels), 4, [&](int begin, int end) {
      T tile[TILE][P];
      for (int64_t at = panel + begin; at < panel + end; at++) {
        const int64_t from = std::max(first, at * P), to = std::min(first + rows, (at + 1) * P);
        const int64_t count = to - from;
        T* out = packed + at * columns * P + from % P;
        for (int64_t k = 0; k < columns; k += TILE) {
          const int64_t width = std::min<int64_t>(TILE, columns - k);
          for (int64_t row = 0; row < count; row++) {
            for (int64_t c = 0; c < width; c++) {
              put(value(from - first + row, k + c), &tile[c][row]);
            }
          }
          for (int64_t c = 0; c < width; c++) {
            std::copy_n(tile[c], count, out + (k + c) * P);
          }
        }
      }
    });
  });
}

template <class T, class Source>
void pack(T* packed, const Source* source, int64_t rows, int64_t columns, int64_t stride,
          int64_t first, int threads) {
  const auto value = [=](int64_t row, int64_t k) { return source[row * stride + k]; };
  pack(packed, value, rows, columns, first, threads);
}

// The same in groups of COUNT numbers, zeros behind the last column: `convert(number, at)` puts one.
template <int COUNT, class T, class Source, class Convert>
void pack_groups(T* packed, const Source* source, int64_t rows, int64_t columns, int64_t stride,
                 int64_t first, int threads, Convert convert) {
  const auto group = [=](int64_t row, int64_t k) {
    const Source* in = source + row * stride + COUNT * k;
    Group<T, COUNT> numbers{};
    for (int64_t i = 0; i < std::min<int64_t>(COUNT, columns - COUNT * k); i++) {
      convert(in[i], &numbers.of[i]);
    }
    return numbers;
  };
  const int64_t groups = (columns + COUNT - 1) / COUNT;
  pack(reinterpret_cast<Group<T, COUNT>*>(packed), group, rows, groups, first, threads);
}

}  // namespace

// Bytes of what a row of x, of bfloat16 where it is `half`, becomes for a weight that is stored so,
// 0 where it stays as it is.
FL_EXPORT int64_t fairlead_digits_bytes(int64_t columns, int32_t stored, int half) {
  return digits_bytes(columns, Stored(stored), half);
}

// Puts source [rows, columns], with `stride` elements between its rows, at rows `first` … of the
// packed weight. The panels' unused rows are not written.
FL_EXPORT void fairlead_pack(float* packed, const float* source, int64_t rows, int64_t columns,
                              int64_t stride, int64_t first, int threads) {
  pack(packed, source, rows, columns, stride, first, threads);
}

// The same into bfloat16, to which floats are rounded.
FL_EXPORT void fairlead_pack_bfloat16(bfloat16* packed, const float* source, int64_t rows,
                                       int64_t columns, int64_t stride, int64_t first,
                                       int threads) {
  pack(packed, source, rows, columns, stride, first, threads);
}

// The same into bfloat16 in panels of [ceil(columns / 2)][P][2] for AVX-512 BF16.
FL_EXPORT void fairlead_pack_bfloat16_pairs(bfloat16* packed, const float* source, int64_t rows,
                                             int64_t columns, int64_t stride, int64_t first,
                                             int threads) {
  const auto round = [](float value, bfloat16* at) { from_float(value, at); };
  pack_groups<2>(packed, source, rows, columns, stride, first, threads, round);
}

// The same of 8-bit integers.
FL_EXPORT void fairlead_pack_int8(int8_t* packed, const int8_t* source, int64_t rows,
                                   int64_t columns, int64_t stride, int64_t first, int threads) {
  pack(packed, source, rows, columns, stride, first, threads);
}

// The same of 8-bit integers into panels of [ceil(columns / 4)][P][4] for VNNI.
FL_EXPORT void fairlead_pack_int8_fours(uint8_t* packed, const int8_t* source, int64_t rows,
                                         int64_t columns, int64_t stride, int64_t first,
                                         int threads) {
  const auto shift = [](int8_t value, uint8_t* at) { *at = uint8_t(value + 128); };
  pack_groups<4>(packed, source, rows, columns, stride, first, threads, shift);
}

// y [count, rows] = x [count, columns] · weightᵀ + bias of each of `weights` weights, which have
// equally many columns and are stored alike: each one's result in its own y. x and all y are
// bfloat16 where `half`. `digits`: memory for those of x, fairlead_digits_bytes for each row.
FL_EXPORT void fairlead_linears(const void* x, int64_t count, int half, char* digits,
                                const Weight* packed, void* const* y, int weights, int threads) {
  run(threads, [&](Team& team) {
    share_products(team, packed, weights, Input{x, digits, half != 0}, int(count),
                   [&](int place, int panel, int row, int rows, const float* tile) {
                     put_tile(packed[place], panel, row, rows, tile, y[place], half);
                   });
  });
}
