// A whole MLP on packed weights in one call.
#include "mlp.h"

#include "export.h"

using namespace fairlead;

// y [count, down.rows] = down · (activation(gate · x) * (up · x)), or down · activation(up · x)
// where `gate` is null, with each one's bias. x and y are bfloat16 where `half`. `gated`
// [count, up.rows], of floats, is overwritten; `digits` and `gated_digits` are memory for those of x
// and of gated, fairlead_digits_bytes for each row.
FL_EXPORT void fairlead_mlp(const void* x, int64_t count, int half, char* digits,
                            const Weight* gate, const Weight* up, int activation,
                            const Weight* down, float* gated, char* gated_digits, void* y,
                            int threads) {
  const Input in{x, digits, half != 0};
  run(threads, [&](Team& team) {
    if (gate == nullptr) {
      share_activated(team, *up, activation, in, int(count), gated);
    } else {
      share_gated(team, *gate, *up, activation, in, int(count), gated);
    }
    team.barrier();
    share_product(team, *down, Input{gated, gated_digits}, int(count),
                  [&](int panel, int row, int rows, const float* tile) {
                    put_tile(*down, panel, row, rows, tile, y, half);
                  });
  });
}
