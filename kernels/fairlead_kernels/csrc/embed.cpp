// Rows of a packed weight as they were before: the embeddings of a model whose head shares them.
#include "export.h"
#include "linear.h"

using namespace fairlead;

namespace {

template <class T>
void embed_row(const Weight& weight, int64_t row, float* out) {
  const int64_t columns = weight.columns;
  const T* data = static_cast<const T*>(weight.data) + row / P * columns * P + row % P;
  for (int64_t k = 0; k < columns; k++) out[k] = to_float(data[k * P]);
}

void embed_row_in_fours(const Weight& weight, int64_t row, float* out) {
  const int64_t columns = weight.columns, fours = (columns + 3) / 4;
  const uint8_t* data =
      static_cast<const uint8_t*>(weight.data) + (row / P * fours * P + row % P) * 4;
  for (int64_t k = 0; k < columns; k++) out[k] = float(data[k / 4 * P * 4 + k % 4]) - 128.0f;
}

void embed_row_in_pairs(const Weight& weight, int64_t row, float* out) {
  const int64_t columns = weight.columns, pairs = (columns + 1) / 2;
  const bfloat16* data =
      static_cast<const bfloat16*>(weight.data) + (row / P * pairs * P + row % P) * 2;
  for (int64_t k = 0; k < columns; k++) out[k] = to_float(data[k / 2 * P * 2 + k % 2]);
}

void embed_row(const Weight& weight, int64_t row, float* out) {
  switch (weight.stored) {
    case FLOAT32: return embed_row<float>(weight, row, out);
    case BFLOAT16: return embed_row<bfloat16>(weight, row, out);
    case INT8: return embed_row<int8_t>(weight, row, out);
    case BFLOAT16_PAIRS: return embed_row_in_pairs(weight, row, out);
    case INT8_FOURS:
    case INT8_TILES: return embed_row_in_fours(weight, row, out);
  }
}

}  // namespace

// out [count, columns] = factor times the weight's rows `ids`, plus the rows `positions` of `table`
// where there is one. Returns 0 where an id or a position [count] is no row, else 1.
FL_EXPORT int fairlead_embed(const int64_t* ids, int64_t count, const Weight* packed, float factor,
                             const float* table, const int64_t* positions, int64_t table_rows,
                             float* out, int threads) {
  const Weight& weight = *packed;
  for (int64_t t = 0; t < count; t++) {
    if (uint64_t(ids[t]) >= uint64_t(weight.rows)) return 0;
    if (table != nullptr && uint64_t(positions[t]) >= uint64_t(table_rows)) return 0;
  }
  const int64_t columns = weight.columns;
  // A row is one cache line per element, so a few of them are worth a second thread.
  run(count > 2 ? threads : 1, [&](Team& team) {
    team.share(int(count), 4, [&](int begin, int end) {
      for (int64_t t = begin; t < end; t++) {
        float* y = out + t * columns;
        embed_row(weight, ids[t], y);
        const float scale = weight.scales == nullptr ? factor : factor * weight.scales[ids[t]];
        const float* added = table == nullptr ? nullptr : table + positions[t] * columns;
        for (int64_t k = 0; k < columns; k++) {
          y[k] = y[k] * scale + (added == nullptr ? 0.0f : added[k]);
        }
      }
    });
  });
  return 1;
}
