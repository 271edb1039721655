// Products of bfloat16 by AVX-512 BF16, which multiplies and adds twice as many pairs of bfloat16 in
// an instruction as floats. A row of activations is rounded to bfloat16, which moves none in a model
// of that type. Sums are floats; numbers below the smallest normal one count as zero.
#pragma once

#include "vnni.h"

namespace fairlead {

// Bytes of one row in bfloat16: whole cache lines, an odd number of them, so that rows do not share
// a place in the first-level cache.
constexpr int64_t pairs_bytes(int64_t columns) { return ((columns * 2 + 63) / 64 | 1) * 64; }

// x [columns] → bfloat16, with a zero after an odd number of them.
template <class T>
void round_row(const T* x, int64_t columns, char* out) {
  bfloat16* const rounded = reinterpret_cast<bfloat16*>(out);
  for (int64_t k = 0; k < columns; k += W) store_at(rounded, load_at(x, k, columns), k, columns);
  if (columns % 2 != 0) rounded[columns] = bfloat16{0};
}

#if defined(__AVX512F__)

// Adds to each of W sums two products of bfloat16. An instruction, as in vnni.h.
FL_INLINE void add_pairs(Vec& sums, Ints weights, Ints factors) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(factors));
}

// y [rows, P] = as many rows in bfloat16 as there are I, `stride` bytes apart, times a panel
// [steps][P][2], or += with `accumulate`. Each step fetches two lines from `next` on, `advance`
// bytes apart.
template <int... I>
void pairs_block(const char* x, int64_t stride, const uint8_t* panel, int steps, float* y,
                 bool accumulate, const char* next, int advance) {
  Vec low[] = {accumulate ? load(y + I * P) : Vec{}...};
  Vec high[] = {accumulate ? load(y + I * P + W) : Vec{}...};
  for (const char* at = x; at < x + 4 * int64_t(steps); at += 4) {
    const Ints first = load_bytes(panel), second = load_bytes(panel + 4 * W);
    panel += 4 * P;
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + 64, 0, 2);
    next += advance;
    Ints pair;
    ((pair = four_times(at + I * stride), add_pairs(low[I], first, pair),
      add_pairs(high[I], second, pair)),
     ...);
  }
  ((store(y + I * P, low[I]), store(y + I * P + W, high[I])), ...);
}

template <int... I>
constexpr auto pairs_block_of(std::integer_sequence<int, I...>) {
  return pairs_block<I...>;
}

using PairsBlock = void (*)(const char*, int64_t, const uint8_t*, int, float*, bool, const char*,
                            int);

template <int... I>
constexpr PairsBlock pairs_block_of(int rows, std::integer_sequence<int, I...>) {
  constexpr PairsBlock blocks[] = {pairs_block_of(std::make_integer_sequence<int, I + 1>())...};
  return blocks[rows - 1];
}

// y [rows, P] = rows in bfloat16, `stride` bytes apart, times a panel [steps][P][2], or += with
// `accumulate`.
inline void pairs_product(int rows, const char* x, int64_t stride, const uint8_t* panel, int steps,
                          float* y, bool accumulate, bool last) {
  spread_rows(rows, MAX_ROWS, panel, steps, last,
              [&](int row, int count, const char* next, int advance) {
                pairs_block_of(count, std::make_integer_sequence<int, MAX_ROWS>())(
                    x + row * stride, stride, panel, steps, y + row * P, accumulate, next,
                    advance);
              });
}

#else

// Weights are packed in pairs only where the processor multiplies them.
inline void pairs_product(int, const char*, int64_t, const uint8_t*, int, float*, bool, bool) {
  __builtin_trap();
}

#endif

}  // namespace fairlead
