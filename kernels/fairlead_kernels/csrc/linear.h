// A linear layer on packed weights, as one phase of a team's work.
#pragma once

#include "amx.h"
#include "pairs.h"
#include "product.h"
#include "team.h"
#include "vnni.h"

#include <type_traits>

namespace fairlead {

// Rows whose results for one panel are collected before they are stored: they stay in the
// first-level cache.
constexpr int TILE_ROWS = 256;
// Columns of x and rows of a panel that are multiplied at a time where there are many rows: the
// part of the panel stays in the second-level cache, beside the rows' parts of x.
constexpr int DEEP = 512;
// Of the second-level cache, for the rows of x that are multiplied by one panel after the other.
constexpr int64_t CACHED_BYTES = 512 << 10;

// Rows from which tiles pay for their configuration.
constexpr int ROWS_FOR_TILES = 32;

// How a weight's elements are stored; cpu_arguments.py has the same numbers. INT8_TILES is
// INT8_FOURS where products of many rows may use AMX.
enum Stored : int32_t { FLOAT32, BFLOAT16, INT8, INT8_FOURS, INT8_TILES, BFLOAT16_PAIRS };

// A packed weight: [ceil(rows / P)] panels of [columns][P], zero where there are no more rows.
// With INT8_FOURS panels of [ceil(columns / 4)][P][4], unsigned and 128 more than the weight, for
// VNNI; with BFLOAT16_PAIRS panels of [ceil(columns / 2)][P][2], for AVX-512 BF16.
struct Weight {
  const void* data;
  int64_t rows;
  int64_t columns;
  const float* bias;    // [rows], or null
  const float* scales;  // [rows], each row's factor, or null
  Stored stored;

  int panels() const { return int((rows + P - 1) / P); }
  bool in_fours() const { return stored == INT8_FOURS || stored == INT8_TILES; }

  // Its rows from `first` on, the first of a panel, as a weight.
  Weight from(int64_t first, int64_t count) const {
    const bool half = stored == BFLOAT16 || stored == BFLOAT16_PAIRS;
    const int64_t group = in_fours() ? 4 : stored == BFLOAT16_PAIRS ? 2 : 1;
    const int64_t numbers = (columns + group - 1) / group * group;
    const int64_t size = stored == FLOAT32 ? 4 : half ? 2 : 1;
    Weight part = *this;
    part.data = static_cast<const char*>(data) + first * numbers * size;
    part.rows = count;
    if (bias != nullptr) part.bias = bias + first;
    if (scales != nullptr) part.scales = scales + first;
    return part;
  }
};

// Bytes of what a row of x, of bfloat16 where it is `half`, becomes before it is multiplied by a
// weight that is stored so: its digits, or its numbers in the weight's type; 0 where it stays as it
// is.
inline int64_t digits_bytes(int64_t columns, Stored stored, bool half) {
  if (stored == BFLOAT16_PAIRS) return pairs_bytes(columns);
  if (stored == INT8_FOURS || stored == INT8_TILES) return digits_bytes(columns);
  return half ? columns * 4 : 0;
}

// What weights are multiplied by: x [rows, columns], of floats, or of bfloat16 where it is `half`,
// and memory for its digits, digits_bytes for each row.
struct Input {
  const void* x;
  char* digits;
  bool half = false;

  // Its rows from `row` on, for a weight that multiplies floats.
  const float* floats(int64_t row, int64_t columns) const {
    return (half ? reinterpret_cast<const float*>(digits) : static_cast<const float*>(x)) +
           row * columns;
  }
};

// What a row of x becomes before it is multiplied by the weight.
template <class T>
void prepare_row(const Weight& weight, const T* x, char* digits) {
  const int64_t columns = weight.columns;
  const auto widen = [&](float* to) {
    for (int64_t k = 0; k < columns; k += W) store_at(to, load_at(x, k, columns), k, columns);
    return to;
  };
  if (weight.stored == BFLOAT16_PAIRS) {
    round_row(x, columns, digits);
  } else if (!weight.in_fours()) {
    widen(reinterpret_cast<float*>(digits));
  } else if constexpr (std::is_same_v<T, float>) {
    split_row(x, int(columns), digits);
  } else {
    split_row(widen(scratch(size_t(columns))), int(columns), digits);
  }
}

// Makes the digits of an input where the weight is multiplied by them: a row's are its own
// whatever the other rows are. All threads of the team call it.
inline void prepare(Team& team, const Weight& weight, const Input& in, int rows) {
  const int64_t stride = digits_bytes(weight.columns, weight.stored, in.half);
  if (stride == 0) return;
  with_type(in.half, [&](auto number) {
    const auto* x = static_cast<const decltype(number)*>(in.x);
    team.share(rows, 1, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        prepare_row(weight, x + row * weight.columns, in.digits + row * stride);
      }
    });
  });
  team.barrier();
}

// One panel's results for rows of x [rows, columns], without scales and bias, into tile [rows, P].
template <class T>
void multiply_panel_of(const Weight& weight, int panel, const float* x, int rows, float* tile,
                       bool last) {
  const int columns = int(weight.columns);
  const T* data = static_cast<const T*>(weight.data) + int64_t(panel) * columns * P;
  // Widening a bfloat16 for each block of rows takes time from products.
  constexpr bool widens = std::is_same_v<T, bfloat16>;
  if (rows <= MAX_ROWS || columns <= 2 * DEEP) {
    float* const wide = widens && columns <= 2 * DEEP ? scratch(size_t(columns) * P) : nullptr;
    product<T>(rows, x, columns, data, columns, tile, P, false,
               last ? nullptr : data + int64_t(columns) * P, wide);
    return;
  }
  float* const wide = widens ? scratch(size_t(DEEP) * P) : nullptr;
  for (int from = 0; from < columns; from += DEEP) {
    const int depth = columns - from < DEEP ? columns - from : DEEP;
    const bool more = !last || from + depth < columns;
    const T* part = data + int64_t(from) * P;
    product<T>(rows, x + from, columns, part, depth, tile, P, from > 0,
               more ? part + int64_t(depth) * P : nullptr, wide);
  }
}

// The same of an input's digits.
inline void multiply_digits_panel(const Weight& weight, int panel, const char* digits, int rows,
                                  float* tile, bool last) {
  const int64_t steps = (weight.columns + 3) / 4;
  const uint8_t* data = static_cast<const uint8_t*>(weight.data) + panel * steps * P * 4;
  const int64_t stride = digits_bytes(weight.columns);
#if defined(__AVX512F__)
  if (weight.stored == INT8_TILES && rows >= ROWS_FOR_TILES) {
    const int blocks = rows / TILE, done = blocks * TILE;
    tiles_product(blocks, digits, stride, data, int(steps), tile);
    if (done == rows) return;
    digits += done * stride;
    tile += done * P;
    rows -= done;
  }
#endif
  digits_product(rows, digits, stride, data, int(steps), tile, last);
}

// The same of an input in bfloat16.
inline void multiply_pairs_panel(const Weight& weight, int panel, const char* x, int rows,
                                 float* tile, bool last) {
  const int64_t stride = pairs_bytes(weight.columns);
  const int steps = int((weight.columns + 1) / 2);
  const uint8_t* data = static_cast<const uint8_t*>(weight.data) + int64_t(panel) * steps * P * 4;
  const int deep = rows <= MAX_ROWS || steps <= 2 * DEEP ? steps : DEEP;
  for (int from = 0; from < steps; from += deep) {
    const int depth = steps - from < deep ? steps - from : deep;
    pairs_product(rows, x + 4 * from, stride, data + int64_t(from) * P * 4, depth, tile, from > 0,
                  last && from + depth == steps);
  }
}

// One panel's results for `rows` rows of an input from `row` on, with scales, for a weight of any
// type.
inline void multiply_panel(const Weight& weight, int panel, const Input& in, int64_t row, int rows,
                           float* tile, bool last) {
  const float* x = in.floats(row, weight.columns);
  switch (weight.stored) {
    case INT8_FOURS:
    case INT8_TILES: {
      const char* digits = in.digits + row * digits_bytes(weight.columns);
      multiply_digits_panel(weight, panel, digits, rows, tile, last);
      break;
    }
    case BFLOAT16_PAIRS: {
      const char* pairs = in.digits + row * pairs_bytes(weight.columns);
      multiply_pairs_panel(weight, panel, pairs, rows, tile, last);
      break;
    }
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

// Calls `work(panel, first row, rows, last)` for each of the first `panels` of a weight and each
// piece of an input's `rows` rows, at most TILE_ROWS; `last`: no panel follows for these rows. A
// thread takes one panel after the other for the same rows, which stay in the second-level cache:
// with all rows of a long prompt for one panel they would come from memory again for the next.
template <class Work>
void share_tiles(Team& team, const Weight& weight, int panels, int rows, Work work) {
  if (rows == 0) return;
  // Rows that are multiplied at a time: a piece is a multiple of them. Pieces are even: a small one
  // at the end would read the whole weight again for little work.
  const int block = weight.stored == INT8_TILES ? TILE : MAX_ROWS;
  const int fit = int(CACHED_BYTES / (4 * weight.columns)) / block * block;
  const int least = 8 * block, highest = TILE_ROWS / block * block;
  const int most = fit > highest ? highest : fit < least ? least : fit;
  const int pieces = (rows + most - 1) / most;
  const int size = ((rows + pieces - 1) / pieces + block - 1) / block * block;
  const int grain = pieces == 1 && panels / team.size >= 32 ? 4 : 1;
  team.share(pieces * panels, grain, [&](int begin, int end) {
    for (int item = begin; item < end; item++) {
      const int row = item / panels * size, panel = item % panels;
      work(panel, row, rows - row < size ? rows - row : size, panel + 1 == panels);
    }
  });
}

// Calls `finish(place, panel, first row, rows, tile)` for each piece of an input of `rows` rows times
// each of `count` weights, which have equally many columns and are stored alike; the tile [rows, P]
// has no bias yet. All threads of the team call it; a barrier must follow.
template <class Finish>
void share_products(Team& team, const Weight* weights, int count, const Input& in, int rows,
                    Finish finish) {
  prepare(team, weights[0], in, rows);
  int panels = 0;
  for (int i = 0; i < count; i++) panels += weights[i].panels();
  alignas(64) float tile[TILE_ROWS * P];
  share_tiles(team, weights[0], panels, rows, [&](int panel, int row, int some, bool) {
    int place = 0;
    for (; panel >= weights[place].panels(); place++) panel -= weights[place].panels();
    const Weight& weight = weights[place];
    multiply_panel(weight, panel, in, row, some, tile, panel + 1 == weight.panels());
    finish(place, panel, row, some, tile);
  });
}

// The same of one weight: `finish(panel, first row, rows, tile)`.
template <class Finish>
void share_product(Team& team, const Weight& weight, const Input& in, int rows, Finish finish) {
  share_products(team, &weight, 1, in, rows,
                 [&](int, int panel, int row, int some, const float* tile) {
                   finish(panel, row, some, tile);
                 });
}

// y [rows, weight.rows] (+)= the tile and the bias: `add` for a residual.
template <class T>
void store_tile(const Weight& weight, int panel, int row, int rows, const float* tile, T* y,
                bool add) {
  const int64_t first = int64_t(panel) * P;
  for (int half = 0; half < 2; half++) {
    const int64_t column = first + half * W;
    const int width = int(weight.rows - column < W ? weight.rows - column : W);
    if (width <= 0) return;
    const Vec bias = weight.bias == nullptr ? Vec{} : load_part(weight.bias + column, width);
    for (int i = 0; i < rows; i++) {
      T* out = y + (row + i) * weight.rows + column;
      const Vec value = load(tile + i * P + half * W) + bias;
      if (width == W) {
        store(out, add ? load(out) + value : value);
      } else {
        store_part(out, add ? load_part(out, width) + value : value, width);
      }
    }
  }
}

// The same into floats, or bfloat16 where y is `half`, without a residual.
inline void put_tile(const Weight& weight, int panel, int row, int rows, const float* tile, void* y,
                     bool half) {
  with_type(half, [&](auto number) {
    store_tile(weight, panel, row, rows, tile, static_cast<decltype(number)*>(y), false);
  });
}

}  // namespace fairlead
