// What the scans of Mamba 1 and 2 share: rows of a sequence's state in a thread's memory, as whole
// vectors, and numbers of either type.
#pragma once

#include "simd.h"
#include "states.h"

namespace fairlead {

constexpr int64_t BLOCK_FLOATS = 4096;  // of a task's state: it stays in the first cache

inline int64_t whole(int64_t count) { return (count + W - 1) / W * W; }

// Rows of a state which one task computes: a multiple of W.
inline int64_t block_rows(int64_t rows, int64_t padded) {
  const int64_t most = BLOCK_FLOATS / padded / W * W;
  return most < W ? W : most < rows ? most : whole(rows);
}

// Rows of `size` floats, `first` and `count` - 1 behind it, of the state of one of the rows: [whole(
// count), whole(size)], with zeros around them.
inline void read_rows(const StateRows& rows, const StatePlace& place, int64_t sequence,
                      int64_t first, int64_t count, int64_t size, float* out) {
  const int64_t padded = whole(size);
  int64_t read = 0;
  if (!rows.begins[sequence]) {
    const int64_t* units = rows.source + sequence * rows.units;
    read_columns(place, units, first * size * 4, count, size, 0, size, padded, out);
    read = count * padded;
  }
  std::fill(out + read, out + whole(count) * padded, 0.0f);
}

inline void write_rows(const StateRows& rows, const StatePlace& place, int64_t sequence,
                       int64_t first, int64_t count, int64_t size, const float* in) {
  const int64_t* units = rows.target + sequence * rows.units;
  write_columns(place, units, first * size * 4, count, size, 0, size, whole(size), in);
}

// `out` [whole(count)] = the row, with zeros behind it.
template <class T>
FL_INLINE void spread(const T* row, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += W) store(out + i, load_at(row, i, count));
}

// W numbers of which each is `stride` elements from the next.
template <class T>
FL_INLINE Vec gather(const T* first, int64_t stride, int count) {
  float numbers[W] = {};
  for (int i = 0; i < count; i++) numbers[i] = to_float(first[i * stride]);
  return load(numbers);
}

}  // namespace fairlead
