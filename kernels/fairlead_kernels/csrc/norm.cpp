// Residual and norm of each row.
#include "norm.h"

#include "export.h"
#include "team.h"

using namespace fairlead;

// total [count, width] = x + residual, or x where there is no residual (then `total` is not
// written and may be null); out = the norm of total. `total` may be x or residual.
FL_EXPORT void fairlead_norm(const float* x, const float* residual, const Norm* norm, int64_t count,
                              int64_t width, float* total, float* out, int threads) {
  const int n = int(width);
  // A thread is worth waking for some tens of microseconds only.
  run(count * width < 1 << 15 ? 1 : threads, [&](Team& team) {
    team.share(int(count), 4, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        const float* in = x + row * width;
        if (residual != nullptr) {
          const float* add = residual + row * width;
          float* sum = total + row * width;
          int i = 0;
          for (; i + W <= n; i += W) store(sum + i, load(in + i) + load(add + i));
          for (; i < n; i++) sum[i] = in[i] + add[i];
          in = sum;
        }
        normalize(in, *norm, n, out + row * width);
      }
    });
  });
}
