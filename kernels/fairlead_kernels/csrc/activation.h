// activation(gate) * up, with SiLU, GELU and GELU's approximation with tanh (Hendrycks and
// Gimpel, 2016).
#pragma once

#include "simd.h"

namespace fairlead {

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2 };

FL_INLINE Vec activate(Vec x, int activation) {
  if (activation == SILU) return x / (1.0f + exp(-x));
  if (activation == GELU) return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

}  // namespace fairlead
