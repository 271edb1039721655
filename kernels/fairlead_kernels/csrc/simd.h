// Vectors of floats, as wide as the instruction set that this library is compiled for.
//
// Only the compiler's vector types are used, no intrinsics: the same source gives SSE2, AVX2 and
// AVX-512 code. Each instruction set is a library of its own (see compilation.py), so no function
// compiled for one can be linked into another.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace fairlead {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

using Vec = float __attribute__((vector_size(4 * W)));
using Ints = int32_t __attribute__((vector_size(4 * W)));
using Unaligned = float __attribute__((vector_size(4 * W), aligned(4), may_alias));

// The storage type of bfloat16: the upper half of a float.
struct bfloat16 {
  uint16_t bits;
};

#define FL_INLINE inline __attribute__((always_inline))

FL_INLINE Vec splat(float value) { return value - Vec{}; }
FL_INLINE Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
FL_INLINE void store(float* p, Vec v) { *reinterpret_cast<Unaligned*>(p) = v; }
FL_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

// GCC makes one instruction of the loops in these two, but many of a conversion of vectors.
FL_INLINE Vec load(const bfloat16* p) {
  uint32_t __attribute__((vector_size(4 * W))) wide;
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) wide[i] = p[i].bits;
  return reinterpret_cast<Vec>(wide << 16);
}
FL_INLINE Vec load(const int8_t* p) {
  Ints wide;
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) wide[i] = p[i];
  return __builtin_convertvector(wide, Vec);
}

FL_INLINE float to_float(float value) { return value; }
FL_INLINE float to_float(bfloat16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

FL_INLINE void from_float(float value, float* out) { *out = value; }
// Rounds to nearest, ties to even, and keeps NaN, as torch does.
FL_INLINE void from_float(float value, bfloat16* out) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  out->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

FL_INLINE void store(bfloat16* p, Vec v) {
  using Bits = uint32_t __attribute__((vector_size(4 * W)));
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Bits rounded = v != v ? Bits{} + 0x7fc0 : even;
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) p[i].bits = uint16_t(rounded[i]);
}

// The first `count` < W elements; the others are zero and their memory is not read.
template <class T>
FL_INLINE Vec load_part(const T* p, int count) {
  T part[W] = {};
  memcpy(part, p, size_t(count) * sizeof(T));
  return load(part);
}

template <class T>
FL_INLINE void store_part(T* p, Vec v, int count) {
  T part[W];
  store(part, v);
  memcpy(p, part, size_t(count) * sizeof(T));
}

// W numbers or, where fewer than W of `count` are left from `at` on, those with zeros behind them.
template <class T>
FL_INLINE Vec load_at(const T* row, int64_t at, int64_t count) {
  return at + W <= count ? load(row + at) : load_part(row + at, int(count - at));
}

template <class T>
FL_INLINE void store_at(T* row, Vec v, int64_t at, int64_t count) {
  if (at + W <= count) {
    store(row + at, v);
  } else {
    store_part(row + at, v, int(count - at));
  }
}

// Calls `work` with a number of the type that numbers have: bfloat16 where they are `half`.
template <class Work>
FL_INLINE void with_type(bool half, Work work) {
  if (half) {
    work(bfloat16{});
  } else {
    work(0.0f);
  }
}

template <int... I>
FL_INLINE Ints counting(std::integer_sequence<int, I...>) {
  return Ints{I...};
}
// Whether each of W consecutive numbers from `first` on is below `end`.
FL_INLINE Ints below(int first, int end) {
  return counting(std::make_integer_sequence<int, W>()) < end - first;
}

template <int... I>
FL_INLINE Vec interleave_low(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...);
}
template <int... I>
FL_INLINE Vec interleave_high(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...);
}
// a0 b0 a1 b1 … of the lower, or the upper, halves.
FL_INLINE Vec interleave_low(Vec a, Vec b) {
  return interleave_low(a, b, std::make_integer_sequence<int, W>());
}
FL_INLINE Vec interleave_high(Vec a, Vec b) {
  return interleave_high(a, b, std::make_integer_sequence<int, W>());
}

// Transposes W rows in place, by the perfect shuffle: log2(W) rounds that interleave row i with
// row i + W/2.
FL_INLINE void transpose(Vec (&rows)[W]) {
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
    Vec next[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; i++) {
      next[2 * i] = interleave_low(rows[i], rows[i + W / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + W / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
}

// A vector of the sums of W vectors. The same network as `transpose`, adding at each round. Of
// N < W vectors the first rounds: with those of the rows g, g + W / N, g + 2 · W / N and so on for
// each g < W / N, the sums of these results are the sums of all rows.
template <int N>
FL_INLINE Vec sums(Vec (&rows)[N]) {
#pragma GCC unroll 4
  for (int half = N / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) {
      rows[i] = interleave_low(rows[i], rows[i + half]) + interleave_high(rows[i], rows[i + half]);
    }
  }
  return rows[0];
}

// A vector of the largest elements of W vectors, by the same network.
FL_INLINE Vec largest(Vec (&rows)[W]) {
#pragma GCC unroll 4
  for (int half = W / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) {
      const Vec one = rows[i], other = rows[i + half];
      rows[i] = max(interleave_low(one, other), interleave_high(one, other));
    }
  }
  return rows[0];
}

template <int... I>
FL_INLINE Vec rotated(Vec v, int by, std::integer_sequence<int, I...>) {
  if (by == 8) return __builtin_shufflevector(v, v, ((I + 8) % W)...);
  if (by == 4) return __builtin_shufflevector(v, v, ((I + 4) % W)...);
  if (by == 2) return __builtin_shufflevector(v, v, ((I + 2) % W)...);
  return __builtin_shufflevector(v, v, ((I + 1) % W)...);
}

FL_INLINE float sum(Vec v) {
#pragma GCC unroll 4
  for (int half = W / 2; half >= 1; half /= 2) {
    v += rotated(v, half, std::make_integer_sequence<int, W>());
  }
  return v[0];
}

// e^x to 2 units in the last place; 0 below -87.3, finite up to 88.3 and clamped above. The
// polynomial is that of expf in Moshier's Cephes library.
FL_INLINE Vec exp(Vec x) {
  const Vec lowest = splat(-87.3f), highest = splat(88.3f);
  const auto vanishes = x < lowest;
  x = vanishes ? lowest : x > highest ? highest : x;
  const float shifter = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const Vec n = (x * 1.44269504088896341f + shifter) - shifter;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints scaled = reinterpret_cast<Ints>(p) + (__builtin_convertvector(n, Ints) << 23);
  return vanishes ? Vec{} : reinterpret_cast<Vec>(scaled);
}

// ln(1 + x) for x from 0 to 1: Cephes' logf, with what 1 + x has lost to rounding added.
FL_INLINE Vec log_of_one_and(Vec x) {
  const Vec one = x + 1.0f;
  const auto large = one > 1.41421356f;
  const Vec r = (large ? one * 0.5f : one) - 1.0f;
  const Vec z = r * r;
  Vec p = splat(7.0376836292e-2f);
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  const Vec power = large ? splat(1.0f) : Vec{};
  const Vec lost = (x - (one - 1.0f)) / one;
  const Vec small = p * r * z - power * 2.12194440e-4f - 0.5f * z + lost;
  return r + small + power * 0.693359375f;
}

// ln(1 + e^x), without its overflow.
FL_INLINE Vec softplus(Vec x) {
  const Vec positive = x > 0.0f ? x : Vec{};
  return positive + log_of_one_and(exp(x > 0.0f ? -x : x));
}

// Cephes' tanhf: a polynomial near zero, where the exponential form would cancel.
FL_INLINE Vec tanh(Vec x) {
  const Vec far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  const Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec near = p * z * x + x;
  return z < 0.390625f ? near : far;
}

// erf by the rational approximation that Eigen and XLA use for floats.
FL_INLINE Vec erf(Vec x) {
  x = x < -4.0f ? splat(-4.0f) : x > 4.0f ? splat(4.0f) : x;
  const Vec z = x * x;
  Vec p = splat(-2.72614225801306e-10f);
  p = p * z + 2.77068142495902e-08f;
  p = p * z - 2.10102402082508e-06f;
  p = p * z - 5.69250639462346e-05f;
  p = p * z - 7.34990630326855e-04f;
  p = p * z - 2.95459980854025e-03f;
  p = p * z - 1.60960333262415e-02f;
  Vec q = splat(-1.45660718464996e-05f);
  q = q * z - 2.13374055278905e-04f;
  q = q * z - 1.68282697438203e-03f;
  q = q * z - 7.37332916720468e-03f;
  q = q * z - 1.42647390514189e-02f;
  return x * p / q;
}

}  // namespace fairlead
