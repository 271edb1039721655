// Products of floats and 8-bit integers by AVX-512 VNNI, which multiplies and adds four times as
// many pairs of bytes in an instruction as floats.
//
// A row of activations is rounded to 16 bits and written in two signed digits of base 256:
// x ≈ scale · (256 · high + low), the scale such that its largest element becomes ±32639, the
// largest number of two digits. So two integer sums, which are exact, give the product, and an
// element moves by at most 1/65278 of its row's largest. One digit would be int8 activations.
//
// vpdpbusd multiplies unsigned by signed bytes. The panel has w + 128, and what that adds,
// 128 · Σ digits, is subtracted from where a row's sums begin. Sums are modulo 2^32: they may
// leave int32 on their way and are right at the end, for up to 131,071 columns (`cpu.py` packs
// others otherwise).
#pragma once

#include <cstddef>

#include "product.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace fairlead {

// Columns whose digits lie together, those of `high` before those of `low`: a cache line each.
constexpr int DIGITS = 64;
constexpr float LARGEST_DIGITS = 127 * 256 + 127;

// What precedes a row's digits, padded to a cache line.
struct alignas(64) DigitsHead {
  float scale;
  int32_t high, low;  // where the sums begin
};

// Bytes of the digits of one row.
constexpr int64_t digits_bytes(int64_t columns) {
  return int64_t(sizeof(DigitsHead)) + (columns + DIGITS - 1) / DIGITS * 2 * DIGITS;
}

// A row's digits are padded with zeros to a multiple of DIGITS; those that meet no weights of the
// panel, whose columns are padded to a multiple of 4, are not read.
#if defined(__AVX512F__)

// x [columns] → its digits. An infinity or NaN makes the scale one, and so the row's results.
inline void split_row(const float* x, int columns, char* out) {
  constexpr int LANES = 16;
  const auto rest = [&](int k) {
    return columns - k >= LANES ? __mmask16(0xffff)
           : k < columns        ? __mmask16((1u << (columns - k)) - 1)
                                : __mmask16(0);
  };
  // As integers, absolute floats are in order, with NaN the largest.
  __m512i largest = _mm512_setzero_si512();
  for (int k = 0; k < columns; k += LANES) {
    const __m512i bits = _mm512_maskz_loadu_epi32(rest(k), x + k);
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  const int32_t bits = _mm512_reduce_max_epi32(largest);
  float maximum;
  memcpy(&maximum, &bits, sizeof maximum);
  // Below, the factor would overflow; such a row is zero.
  const __m512 factor = _mm512_set1_ps(maximum < 1e-30f ? 0.0f : LARGEST_DIGITS / maximum);
  const __m512i smallest = _mm512_set1_epi32(-int32_t(LARGEST_DIGITS));
  __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
  for (int k = 0; k < columns || k % DIGITS != 0; k += LANES) {
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(rest(k), x + k), factor);
    // What is no number becomes the smallest integer.
    const __m512i number = _mm512_max_epi32(_mm512_cvtps_epi32(scaled), smallest);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
    const __m512i low = _mm512_sub_epi32(number, _mm512_slli_epi32(high, 8));
    high_sum = _mm512_add_epi32(high_sum, high);
    low_sum = _mm512_add_epi32(low_sum, low);
    char* at = out + sizeof(DigitsHead) + k / DIGITS * 2 * DIGITS + k % DIGITS;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at + DIGITS), _mm512_cvtepi32_epi8(low));
  }
  const DigitsHead head{maximum / LARGEST_DIGITS, -128 * _mm512_reduce_add_epi32(high_sum),
                        -128 * _mm512_reduce_add_epi32(low_sum)};
  memcpy(out, &head, sizeof head);
}

// Rows in registers: two vectors of results of each digit, of 32 registers.
constexpr int MAX_DIGIT_ROWS = 7;

// Adds to each of W sums four products of unsigned and signed bytes. As an instruction: GCC 12
// copies the sums of the builtin function, and then has too few registers for them.
FL_INLINE void add_products(Ints& sums, Ints weights, Ints factors) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(factors));
}

FL_INLINE Ints load_bytes(const uint8_t* p) {
  Ints bytes;
  memcpy(&bytes, p, sizeof bytes);
  return bytes;
}

// The four bytes at `p`, W times.
FL_INLINE Ints four_times(const char* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return four - Ints{};
}

FL_INLINE void store_sums(const char* row, Ints high, Ints low, float* y) {
  float scale;
  memcpy(&scale, row, sizeof scale);
  const Vec sum = __builtin_convertvector(high, Vec) * 256.0f + __builtin_convertvector(low, Vec);
  store(y, sum * scale);
}

// y [rows, P] = as many rows of digits as there are I, `stride` bytes apart, times a panel
// [steps][P][4] of w + 128. Each step fetches two lines from `next` on, `advance` bytes apart.
template <int... I>
void digits_block(const char* x, int64_t stride, const uint8_t* panel, int steps, float* y,
                  const char* next, int advance) {
  constexpr int HIGH = offsetof(DigitsHead, high), LOW = offsetof(DigitsHead, low);
  Ints high[][2] = {{four_times(x + I * stride + HIGH), four_times(x + I * stride + HIGH)}...};
  Ints low[][2] = {{four_times(x + I * stride + LOW), four_times(x + I * stride + LOW)}...};
  const char* line = x + sizeof(DigitsHead);
  for (int from = 0; from < steps; from += DIGITS / 4, line += 2 * DIGITS) {
    const char* const end = line + (steps - from < DIGITS / 4 ? 4 * (steps - from) : DIGITS);
    for (const char* at = line; at < end; at += 4) {
      const Ints first = load_bytes(panel), second = load_bytes(panel + 4 * W);
      panel += 4 * P;
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + 64, 0, 2);
      next += advance;
      Ints four;
      ((four = four_times(at + I * stride), add_products(high[I][0], first, four),
        add_products(high[I][1], second, four), four = four_times(at + I * stride + DIGITS),
        add_products(low[I][0], first, four), add_products(low[I][1], second, four)),
       ...);
    }
  }
  ((store_sums(x + I * stride, high[I][0], low[I][0], y + I * P),
    store_sums(x + I * stride, high[I][1], low[I][1], y + I * P + W)),
   ...);
}

template <int... I>
constexpr auto digits_block_of(std::integer_sequence<int, I...>) {
  return digits_block<I...>;
}

using DigitsBlock = void (*)(const char*, int64_t, const uint8_t*, int, float*, const char*, int);

template <int... I>
constexpr DigitsBlock digits_block_of(int rows, std::integer_sequence<int, I...>) {
  constexpr DigitsBlock blocks[] = {
      digits_block_of(std::make_integer_sequence<int, I + 1>())...};
  return blocks[rows - 1];
}

// Calls `work(first row, rows, next, advance)` for blocks of at most `most` of some rows, which are
// spread evenly over them, times a panel of `steps` times 4 · P bytes. Several blocks fetch the next
// panel meanwhile, if there is one, from `next` on, `advance` bytes each step; one fetches its own
// panel, a little ahead, and the beginning of the next.
template <class Work>
inline void spread_rows(int rows, int most, const uint8_t* panel, int steps, bool last, Work work) {
  const int blocks = (rows + most - 1) / most;
  const int advance = last ? 0 : (4 * P + blocks - 1) / blocks;
  const int64_t ahead = blocks == 1 ? bytes_ahead(rows) : int64_t(steps) * 4 * P;
  const char* next = reinterpret_cast<const char*>(panel) + (last ? 0 : ahead);
  for (int block = 0, row = 0; block < blocks; block++, next += int64_t(steps) * advance) {
    const int count = (rows - row + blocks - block - 1) / (blocks - block);
    work(row, count, next, advance);
    row += count;
  }
}

// y [rows, P] = rows of digits, `stride` bytes apart, times a panel [steps][P][4] of w + 128.
inline void digits_product(int rows, const char* x, int64_t stride, const uint8_t* panel,
                           int steps, float* y, bool last) {
  spread_rows(rows, MAX_DIGIT_ROWS, panel, steps, last,
              [&](int row, int count, const char* next, int advance) {
                digits_block_of(count, std::make_integer_sequence<int, MAX_DIGIT_ROWS>())(
                    x + row * stride, stride, panel, steps, y + row * P, next, advance);
              });
}

#else

// Weights are packed for digits only where the processor has VNNI.
inline void split_row(const float*, int, char*) { __builtin_trap(); }
inline void digits_product(int, const char*, int64_t, const uint8_t*, int, float*, bool) {
  __builtin_trap();
}

#endif

}  // namespace fairlead
