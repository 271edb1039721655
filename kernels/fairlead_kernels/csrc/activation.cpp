// The activation of an MLP without a gate.
#include "activation.h"

#include "export.h"
#include "team.h"

using namespace fairlead;

// out [count, width] = activation(x).
FL_EXPORT void fairlead_activate(const float* x, int64_t count, int64_t width, int activation,
                                  float* out, int threads) {
  run(count * width < 1 << 14 ? 1 : threads, [&](Team& team) {
    team.share(int(count), 1, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        activate_row(x + row * width, int(width), activation, out + row * width);
      }
    });
  });
}
