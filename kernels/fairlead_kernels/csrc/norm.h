// Root-mean-square norm (Zhang and Sennrich, 2019) and layer norm (Ba et al., 2016) of one row.
#pragma once

#include "simd.h"

namespace fairlead {

// x / sqrt(mean(x²) + eps) * (weight + offset) + bias, with x minus its mean where `centered`; no
// weight: none of the operation.
template <class T>
struct NormOf {
  const T* weight;
  const T* bias;  // or null
  float eps;
  float offset;
  int32_t centered;
};

using Norm = NormOf<float>;

// The sum of map(x [width]). It has four parts, so that rounding grows slowly.
template <class T, class Map>
inline float sum_of(const T* x, int width, Map map) {
  Vec parts[4] = {};
  int i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    for (int j = 0; j < 4; j++) parts[j] += map(load(x + i + j * W));
  }
  for (; i + W <= width; i += W) parts[0] += map(load(x + i));
  if (i < width) parts[0] += below(i, width) ? map(load_part(x + i, width - i)) : Vec{};
  return sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

// `out` may be `x`. Computes in float, whatever the types are.
template <class T, class Weight>
inline void normalize(const T* x, const NormOf<Weight>& norm, int width, T* out) {
  float mean = 0.0f;
  if (norm.centered) mean = sum_of(x, width, [](Vec v) { return v; }) / float(width);
  const float squares = sum_of(x, width, [&](Vec v) { return (v - mean) * (v - mean); });
  const float scale = 1.0f / __builtin_sqrtf(squares / float(width) + norm.eps);
  int i = 0;
  for (; i + W <= width; i += W) {
    const Vec normal = (load(x + i) - mean) * scale * (load(norm.weight + i) + norm.offset);
    store(out + i, norm.bias == nullptr ? normal : normal + load(norm.bias + i));
  }
  if (i < width) {
    const int rest = width - i;
    const Vec weight = load_part(norm.weight + i, rest) + norm.offset;
    const Vec normal = (load_part(x + i, rest) - mean) * scale * weight;
    const Vec bias = norm.bias == nullptr ? Vec{} : load_part(norm.bias + i, rest);
    store_part(out + i, normal + bias, rest);
  }
}

}  // namespace fairlead
