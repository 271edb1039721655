// The activations of an MLP: SiLU, GELU and its approximation with tanh (Hendrycks and Gimpel,
// 2016), ReLU and its square (So et al., 2021).
#pragma once

#include "simd.h"

namespace fairlead {

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };

FL_INLINE Vec activate(Vec x, int activation) {
  if (activation == SILU) return x / (1.0f + exp(-x));
  if (activation == GELU) return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  if (activation == GELU_TANH) {
    return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
  const Vec positive = x < 0.0f ? Vec{} : x;  // a NaN stays
  return activation == RELU ? positive : positive * positive;
}

// y [width] = activation(x); `y` may be `x`.
inline void activate_row(const float* x, int width, int activation, float* y) {
  int i = 0;
  for (; i + W <= width; i += W) store(y + i, activate(load(x + i), activation));
  if (i < width) store_part(y + i, activate(load_part(x + i, width - i), activation), width - i);
}

}  // namespace fairlead
