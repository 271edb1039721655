// The gate of a gated MLP.
#include "export.h"
#include "mlp.h"

using namespace fairlead;

// out [count, width] = activation(x[:, :width]) * x[:, width:], with x [count, 2 · width].
FL_EXPORT void fairlead_gated(const float* x, int64_t count, int64_t width, int activation,
                               float* out, int threads) {
  run(count * width < 1 << 14 ? 1 : threads, [&](Team& team) {
    team.share(int(count), 1, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        const float* gate = x + row * 2 * width;
        combine(gate, gate + width, int(width), activation, out + row * width);
      }
    });
  });
}
