// The cosines and sines of rotary position embedding (Su et al., 2021).
#include <cmath>

#include "export.h"
#include "team.h"

using namespace fairlead;

// cos and sin [count, 2 · half]: of positions times each frequency [half], in float32 as torch
// multiplies them, times `scale`; both halves alike.
FL_EXPORT void fairlead_angles(const int64_t* positions, int64_t count, const float* frequencies,
                               int half, float scale, float* cos, float* sin, int threads) {
  run(count > 16 ? threads : 1, [&](Team& team) {
    team.share(int(count), 8, [&](int begin, int end) {
      for (int64_t t = begin; t < end; t++) {
        float *c = cos + t * 2 * half, *s = sin + t * 2 * half;
        for (int i = 0; i < half; i++) {
          const float angle = float(positions[t]) * frequencies[i];
          c[i] = c[half + i] = std::cos(angle) * scale;
          s[i] = s[half + i] = std::sin(angle) * scale;
        }
      }
    });
  });
}
