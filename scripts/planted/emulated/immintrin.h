// What our headers take of AVX-512, VNNI and BF16 in plain C++, in place of the compiler's header of
// this name, so that processors without them run their code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

using __m512i = int32_t __attribute__((vector_size(64)));
using __m512 = float __attribute__((vector_size(64)));
using __m128i = int8_t __attribute__((vector_size(16)));
using __mmask16 = uint16_t;

namespace emulated {

constexpr int LANES = 16;
using Unsigned = uint32_t __attribute__((vector_size(64)));

template <class Vector, class T>
inline Vector load_masked(__mmask16 mask, const T* from) {
  Vector values{};
  for (int i = 0; i < LANES; i++) {
    if (mask >> i & 1) memcpy(reinterpret_cast<char*>(&values) + 4 * i, from + i, 4);
  }
  return values;
}

// Four products of unsigned and signed bytes are added to each sum, modulo 2^32.
inline __m512i add_products(__m512i sums, __m512i weights, __m512i factors) {
  uint8_t bytes[4 * LANES];
  int8_t digits[4 * LANES];
  memcpy(bytes, &weights, sizeof bytes);
  memcpy(digits, &factors, sizeof digits);
  for (int i = 0; i < 4 * LANES; i++) {
    sums[i / 4] = int32_t(uint32_t(sums[i / 4]) + uint32_t(int(bytes[i]) * int(digits[i])));
  }
  return sums;
}

// Two products of bfloat16 are added to each sum.
inline __m512 add_products(__m512 sums, __m512i weights, __m512i factors) {
  const auto half = [](const __m512i& pairs, int i) {
    const uint32_t bits = uint32_t(pairs[i / 2]) >> 16 * (i % 2) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (int i = 0; i < 2 * LANES; i++) sums[i / 2] += half(weights, i) * half(factors, i);
  return sums;
}

}  // namespace emulated

// The instruction that each of them writes itself, vpdpbusd and vdpbf16ps.
#define asm(...) sums = emulated::add_products(sums, weights, factors)

inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512i _mm512_set1_epi32(int32_t value) { return value - __m512i{}; }
inline __m512 _mm512_set1_ps(float value) { return value - __m512{}; }
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* from) {
  return emulated::load_masked<__m512i>(mask, static_cast<const int32_t*>(from));
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  return emulated::load_masked<__m512>(mask, static_cast<const float*>(from));
}
inline __m512 _mm512_loadu_ps(const void* from) { return _mm512_maskz_loadu_ps(0xffff, from); }
inline __m512i _mm512_max_epi32(__m512i a, __m512i b) { return a > b ? a : b; }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return reinterpret_cast<__m512i>(reinterpret_cast<emulated::Unsigned>(a) +
                                   reinterpret_cast<emulated::Unsigned>(b));
}
inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return reinterpret_cast<__m512i>(reinterpret_cast<emulated::Unsigned>(a) -
                                   reinterpret_cast<emulated::Unsigned>(b));
}
inline __m512i _mm512_srai_epi32(__m512i a, int bits) { return a >> bits; }
inline __m512i _mm512_slli_epi32(__m512i a, int bits) {
  return reinterpret_cast<__m512i>(reinterpret_cast<emulated::Unsigned>(a) << bits);
}
inline int32_t _mm512_reduce_max_epi32(__m512i a) {
  int32_t largest = a[0];
  for (int i = 1; i < emulated::LANES; i++) largest = a[i] > largest ? a[i] : largest;
  return largest;
}
inline int32_t _mm512_reduce_add_epi32(__m512i a) {
  uint32_t sum = 0;
  for (int i = 0; i < emulated::LANES; i++) sum += uint32_t(a[i]);
  return int32_t(sum);
}
// To the nearest integer, of two to the even; what is no number, or too large, to the smallest.
inline __m512i _mm512_cvtps_epi32(__m512 a) {
  __m512i integers{};
  for (int i = 0; i < emulated::LANES; i++) {
    integers[i] = std::fabs(a[i]) < 0x1p31f ? int32_t(std::lrint(a[i])) : INT32_MIN;
  }
  return integers;
}
inline __m128i _mm512_cvtepi32_epi8(__m512i a) { return __builtin_convertvector(a, __m128i); }
inline void _mm_storeu_si128(__m128i* to, __m128i bytes) { memcpy(to, &bytes, sizeof bytes); }
inline void _mm512_stream_ps(void* to, __m512 values) { memcpy(to, &values, sizeof values); }
inline void _mm_sfence() {}
