// The gate of a gated MLP.
#include "activation.h"

#include "export.h"
#include "team.h"

using namespace fairlead;

// out [count, width] = activation(x[:, :width]) * x[:, width:], with x [count, 2 · width].
FL_EXPORT void fairlead_gated(const float* x, int64_t count, int64_t width, int activation,
                               float* out, int threads) {
  const int n = int(width);
  run(count * width < 1 << 14 ? 1 : threads, [&](Team& team) {
    team.share(int(count), 1, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        const float *gate = x + row * 2 * width, *up = gate + width;
        float* y = out + row * width;
        int i = 0;
        for (; i + W <= n; i += W) {
          store(y + i, activate(load(gate + i), activation) * load(up + i));
        }
        if (i < n) {
          const Vec value = activate(load_part(gate + i, n - i), activation);
          store_part(y + i, value * load_part(up + i, n - i), n - i);
        }
      }
    });
  });
}
