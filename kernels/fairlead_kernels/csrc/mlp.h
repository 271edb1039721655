// The first half of an MLP: what its last matrix multiplies, as one phase of a team's work.
#pragma once

#include "activation.h"
#include "linear.h"

namespace fairlead {

// out [width] = activation(gate) * up.
inline void combine(const float* gate, const float* up, int width, int activation, float* out) {
  int i = 0;
  for (; i + W <= width; i += W) {
    store(out + i, activate(load(gate + i), activation) * load(up + i));
  }
  if (i < width) {
    const Vec value = activate(load_part(gate + i, width - i), activation);
    store_part(out + i, value * load_part(up + i, width - i), width - i);
  }
}

// gated [rows, up.rows] = activation(up), without a gate. All threads of the team call it; a
// barrier must follow.
inline void share_activated(Team& team, const Weight& up, int activation, const Input& in, int rows,
                            float* gated) {
  share_product(team, up, in, rows, [&](int panel, int row, int some, const float* tile) {
    store_tile(up, panel, row, some, tile, gated, false);
    const int64_t first = int64_t(panel) * P;
    const int width = int(up.rows - first < P ? up.rows - first : P);
    for (int i = 0; i < some; i++) {
      float* y = gated + (row + i) * up.rows + first;
      activate_row(y, width, activation, y);
    }
  });
}

// gated [rows, up.rows] = activation(gate) * up. A thread multiplies a panel of the gate and the
// same panel of the other matrix, and combines them while they are in its cache. The two have
// equally many rows and columns and are stored alike. All threads of the team call it; a barrier
// must follow.
inline void share_gated(Team& team, const Weight& gate, const Weight& up, int activation,
                        const Input& in, int rows, float* gated) {
  prepare(team, gate, in, rows);
  alignas(64) float gates[TILE_ROWS * P], ups[TILE_ROWS * P];
  const auto add = [](float* tile, const float* bias, int64_t first, int width) {
    if (bias == nullptr) return;
    for (int i = 0; i < width; i++) tile[i] += bias[first + i];
  };
  share_tiles(team, gate, gate.panels(), rows, [&](int panel, int row, int some, bool last) {
    multiply_panel(gate, panel, in, row, some, gates, last);
    multiply_panel(up, panel, in, row, some, ups, last);
    const int64_t first = int64_t(panel) * P;
    const int width = int(up.rows - first < P ? up.rows - first : P);
    for (int i = 0; i < some; i++) {
      add(gates + i * P, gate.bias, first, width);
      add(ups + i * P, up.bias, first, width);
      combine(gates + i * P, ups + i * P, width, activation, gated + (row + i) * up.rows + first);
    }
  });
}

}  // namespace fairlead
