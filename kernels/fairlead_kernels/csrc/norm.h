// Root-mean-square norm (Zhang and Sennrich, 2019) of one row.
#pragma once

#include "simd.h"

namespace fairlead {

// x / sqrt(mean(x²) + eps) * (weight + offset); no weight: none of the operation.
struct Norm {
  const float* weight;
  float eps;
  float offset;
};

// `out` may be `x`. The sum of squares has four parts, so that rounding grows slowly.
inline void normalize(const float* x, const Norm& norm, int width, float* out) {
  Vec squares[4] = {};
  int i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    for (int j = 0; j < 4; j++) {
      const Vec v = load(x + i + j * W);
      squares[j] += v * v;
    }
  }
  for (; i < width; i += W) {
    const Vec v = width - i >= W ? load(x + i) : load_part(x + i, width - i);
    squares[0] += v * v;
  }
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float scale = 1.0f / __builtin_sqrtf(total / float(width) + norm.eps);
  for (i = 0; i + W <= width; i += W) {
    store(out + i, load(x + i) * scale * (load(norm.weight + i) + norm.offset));
  }
  if (i < width) {
    const Vec weight = load_part(norm.weight + i, width - i) + norm.offset;
    store_part(out + i, load_part(x + i, width - i) * scale * weight, width - i);
  }
}

}  // namespace fairlead
