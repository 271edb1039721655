// A linear layer on packed weights, as one phase of a team's work.
#pragma once

#include "product.h"
#include "team.h"

namespace fairlead {

// Rows whose results for one panel are collected before they are stored: they stay in the
// first-level cache.
constexpr int TILE_ROWS = 256;
// Columns of x and rows of a panel that are multiplied at a time where there are many rows: the
// part of the panel stays in the second-level cache, beside the rows' parts of x.
constexpr int DEEP = 512;

// How a weight's elements are stored; cpu_arguments.py has the same numbers.
enum Stored : int32_t { FLOAT32, BFLOAT16, INT8 };

// A packed weight: [ceil(rows / P)] panels of [columns][P], zero where there are no more rows.
struct Weight {
  const void* data;
  int64_t rows;
  int64_t columns;
  const float* bias;    // [rows], or null
  const float* scales;  // [rows], each row's factor, or null
  Stored stored;

  int panels() const { return int((rows + P - 1) / P); }
};

// One panel's results for rows of x [rows, columns], without scales and bias, into tile [rows, P].
template <class T>
void multiply_panel_of(const Weight& weight, int panel, const float* x, int rows, float* tile,
                       bool last) {
  const int columns = int(weight.columns);
  const T* data = static_cast<const T*>(weight.data) + int64_t(panel) * columns * P;
  if (rows <= 2 * MAX_ROWS || columns <= 2 * DEEP) {
    product<T>(rows, x, columns, data, columns, tile, P, false,
               last ? nullptr : data + int64_t(columns) * P);
    return;
  }
  for (int from = 0; from < columns; from += DEEP) {
    const int depth = columns - from < DEEP ? columns - from : DEEP;
    const bool more = !last || from + depth < columns;
    const T* part = data + int64_t(from) * P;
    product<T>(rows, x + from, columns, part, depth, tile, P, from > 0,
               more ? part + int64_t(depth) * P : nullptr);
  }
}

// The same with scales, for a weight of any type.
inline void multiply_panel(const Weight& weight, int panel, const float* x, int rows, float* tile,
                           bool last) {
  switch (weight.stored) {
    case FLOAT32: multiply_panel_of<float>(weight, panel, x, rows, tile, last); break;
    case BFLOAT16: multiply_panel_of<bfloat16>(weight, panel, x, rows, tile, last); break;
    case INT8: multiply_panel_of<int8_t>(weight, panel, x, rows, tile, last); break;
  }
  if (weight.scales == nullptr) return;
  for (int half = 0; half < 2; half++) {
    const int64_t first = int64_t(panel) * P + half * W;
    const int width = int(weight.rows - first < W ? weight.rows - first : W);
    if (width <= 0) return;
    const Vec scale =
        width == W ? load(weight.scales + first) : load_part(weight.scales + first, width);
    for (int i = 0; i < rows; i++) {
      float* at = tile + i * P + half * W;
      store(at, load(at) * scale);
    }
  }
}

// Calls `finish(panel, first row, rows, tile)` for each piece of x [rows, columns] times weight;
// the tile [rows, P] has no bias yet. All threads of the team call it; a barrier must follow.
template <class Finish>
void share_product(Team& team, const Weight& weight, const float* x, int rows, Finish finish) {
  alignas(64) float tile[TILE_ROWS * P];
  const int panels = weight.panels();
  const int grain = panels / team.size >= 32 ? 4 : 1;
  team.share(panels, grain, [&](int begin, int end) {
    for (int panel = begin; panel < end; panel++) {
      for (int row = 0; row < rows; row += TILE_ROWS) {
        const int count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
        const bool last = panel + 1 == panels || row + count < rows;
        multiply_panel(weight, panel, x + row * weight.columns, count, tile, last);
        finish(panel, row, count, tile);
      }
    }
  });
}

// y [rows, weight.rows] (+)= the tile and the bias: `add` for a residual.
inline void store_tile(const Weight& weight, int panel, int row, int rows, const float* tile,
                       float* y, bool add) {
  const int64_t first = int64_t(panel) * P;
  for (int half = 0; half < 2; half++) {
    const int64_t column = first + half * W;
    const int width = int(weight.rows - column < W ? weight.rows - column : W);
    if (width <= 0) return;
    const Vec bias = weight.bias == nullptr ? Vec{} : load_part(weight.bias + column, width);
    for (int i = 0; i < rows; i++) {
      float* out = y + (row + i) * weight.rows + column;
      const Vec value = load(tile + i * P + half * W) + bias;
      if (width == W) {
        store(out, add ? load(out) + value : value);
      } else {
        store_part(out, add ? load_part(out, width) + value : value, width);
      }
    }
  }
}

}  // namespace fairlead
