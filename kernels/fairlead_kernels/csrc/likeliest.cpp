// The largest of each row of x · weightᵀ + bias, and where it is, without storing the product.
#include <limits>

#include "export.h"
#include "linear.h"
#include "norm.h"

using namespace fairlead;

namespace {

// What one thread has found in its panels for one row, by lane: the largest value, the column that
// its vector begins with, and whether a value was NaN.
struct Found {
  Vec value;
  Ints column;
  Ints nan;
};

void look(const Weight& weight, int panel, int rows, const float* tile, Found* found) {
  for (int half = 0; half < 2; half++) {
    const int first = panel * P + half * W, width = int(weight.rows) - first;
    if (width <= 0) return;
    const Ints inside = below(0, width), columns = Ints{} + first;
    const Vec lowest = splat(-std::numeric_limits<float>::infinity());
    const Vec bias = weight.bias == nullptr ? Vec{}
                     : width >= W           ? load(weight.bias + first)
                                            : load_part(weight.bias + first, width);
    for (int i = 0; i < rows; i++) {
      Found& best = found[i];
      const Vec value = inside ? load(tile + i * P + half * W) + bias : lowest;
      // Threads take panels from each other, so a lane's columns need not come in order.
      const Ints better = (value > best.value) | ((value == best.value) & (columns < best.column));
      best.value = better ? value : best.value;
      best.column = better ? columns : best.column;
      best.nan |= value != value;
    }
  }
}

}  // namespace

// Floats of memory that `fairlead_likeliest` needs for each row and thread.
FL_EXPORT int fairlead_likeliest_part() { return sizeof(Found) / sizeof(float); }

// Of each row of x [count, columns], or of its norm, which takes its place, where there is one: the
// largest value, NaN if one is, and its column, the first among equal ones. `digits` as for
// `fairlead_linear`, `parts`: memory on a cache line's boundary.
FL_EXPORT void fairlead_likeliest(float* x, int64_t count, const Norm* norm, char* digits,
                                  const Weight* packed, float* values, int64_t* columns,
                                  float* parts, int threads) {
  const Weight& weight = *packed;
  Found* const all = reinterpret_cast<Found*>(parts);
  const float infinity = std::numeric_limits<float>::infinity();
  run(threads, [&](Team& team) {
    Found* const mine = all + count * team.index;
    for (int64_t i = 0; i < count; i++) {
      mine[i] = {splat(-infinity), Ints{} + std::numeric_limits<int32_t>::max(), Ints{}};
    }
    if (norm != nullptr) {
      team.share(int(count), 2, [&](int begin, int end) {
        for (int64_t i = begin; i < end; i++) {
          float* row = x + i * weight.columns;
          normalize(row, *norm, int(weight.columns), row);
        }
      });
      team.barrier();
    }
    share_product(team, weight, Input{x, digits}, int(count),
                  [&](int panel, int row, int rows, const float* tile) {
                    look(weight, panel, rows, tile, mine + row);
                  });
    team.barrier();
    team.share(int(count), 16, [&](int begin, int end) {
      for (int64_t i = begin; i < end; i++) {
        float value = -infinity;
        int64_t column = std::numeric_limits<int64_t>::max();
        bool nan = false;
        for (int thread = 0; thread < team.size; thread++) {
          const Found& found = all[count * thread + i];
          for (int lane = 0; lane < W; lane++) {
            const int64_t at = int64_t(found.column[lane]) + lane;
            nan |= found.nan[lane] != 0;
            if (found.value[lane] > value || (found.value[lane] == value && at < column)) {
              value = found.value[lane];
              column = at;
            }
          }
        }
        values[i] = nan ? std::numeric_limits<float>::quiet_NaN() : value;
        columns[i] = column;
      }
    });
  });
}
