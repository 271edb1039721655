// The gated delta rule (S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024), token by
// token over packed sequences with states.
//
// A task is one sequence, one head of values and a block of its columns, whose part of the state
// stays in the caches of one core. Each column is computed by itself, in the order of the tokens.
#include <cmath>

#include "export.h"
#include "simd.h"
#include "states.h"
#include "team.h"

using namespace fairlead;

namespace {

constexpr int VECTORS = 4;  // of a block
constexpr int COLUMNS = VECTORS * W;

struct Delta {
  const void* q;  // [tokens, key_heads, key_dim], with `q_stride` elements from token to token
  const void* k;
  const void* v;  // [tokens, value_heads, value_dim]
  const float* g;  // [tokens, value_heads]: the logarithm of the decay
  const float* beta;
  void* out;  // [tokens, value_heads, value_dim]
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int32_t key_heads;
  int32_t value_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t half;  // q, k, v and out are bfloat16
  int32_t normalizes;
  float scale;
};

// to [size] = x times `scale`, divided by its length if `normalizes`.
template <class T>
void read_vector(const T* x, int size, float scale, bool normalizes, float* to) {
  Vec squares{};
  for (int i = 0; i < size; i += W) {
    const Vec part = i + W <= size ? load(x + i) : load_part(x + i, size - i);
    squares += part * part;
    store(to + i, part);
  }
  if (normalizes) scale /= std::sqrt(sum(squares) + 1e-6f);
  for (int i = 0; i < size; i += W) store(to + i, load(to + i) * scale);
}

// One token: state [rows, N · W] and the columns' values → what it gives.
template <int N>
void step(float* state, int rows, const float* q, const float* k, float decay, float beta,
          const float* v, float* out) {
  constexpr int stride = N * W;
  // Two sums of each column, of even and of odd rows: one would wait for itself.
  Vec kept[2][N] = {}, given[2][N] = {}, change[N];
  int row = 0;
  for (; row + 2 <= rows; row += 2) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        kept[part][n] += load(state + (row + part) * stride + n * W) * k[row + part];
      }
    }
  }
  if (row < rows) {
    for (int n = 0; n < N; n++) kept[0][n] += load(state + row * stride + n * W) * k[row];
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) {
    change[n] = (load(v + n * W) - (kept[0][n] + kept[1][n]) * decay) * beta;
  }
  for (row = 0; row + 2 <= rows; row += 2) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* place = state + (row + part) * stride + n * W;
        const Vec next = load(place) * decay + change[n] * k[row + part];
        store(place, next);
        given[part][n] += next * q[row + part];
      }
    }
  }
  if (row < rows) {
    for (int n = 0; n < N; n++) {
      float* place = state + row * stride + n * W;
      const Vec next = load(place) * decay + change[n] * k[row];
      store(place, next);
      given[0][n] += next * q[row];
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) store(out + n * W, given[0][n] + given[1][n]);
}

template <class T, int N>
void run_block(const Delta& d, const StateRows& rows, const StatePlace& place, int64_t row,
               int head, int column, int columns) {
  constexpr int stride = N * W;
  const int padded = (d.key_dim + W - 1) / W * W;
  float* state = scratch(size_t(d.key_dim) * stride + 2 * padded + 2 * stride);
  float *q = state + d.key_dim * stride, *k = q + padded, *v = k + padded, *given = v + stride;
  const int key_head = head / (d.value_heads / d.key_heads);
  const int64_t at = int64_t(head) * d.key_dim * d.value_dim * 4;
  if (rows.begins[row]) {
    std::fill(state, state + d.key_dim * stride, 0.0f);
  } else {
    read_columns(place, rows.source + row * rows.units, at, d.key_dim, d.value_dim, column, columns,
                 stride, state);
  }
  std::fill(v, v + stride, 0.0f);
  for (int64_t t = rows.starts[row]; t < rows.starts[row + 1]; t++) {
    read_vector(static_cast<const T*>(d.q) + t * d.q_stride + key_head * d.key_dim, d.key_dim,
                d.scale, d.normalizes, q);
    read_vector(static_cast<const T*>(d.k) + t * d.k_stride + key_head * d.key_dim, d.key_dim, 1.0f,
                d.normalizes, k);
    const T* values = static_cast<const T*>(d.v) + t * d.v_stride + head * d.value_dim + column;
    for (int i = 0; i < columns; i++) v[i] = to_float(values[i]);
    const int64_t gate = t * d.value_heads + head;
    step<N>(state, d.key_dim, q, k, exp(splat(d.g[gate]))[0], d.beta[gate], v, given);
    T* out = static_cast<T*>(d.out) + gate * d.value_dim + column;
    for (int i = 0; i < columns; i++) from_float(given[i], out + i);
  }
  write_columns(place, rows.target + row * rows.units, at, d.key_dim, d.value_dim, column, columns,
                stride, state);
}

template <class T>
void run_rows(const Delta& d, const StateRows& rows, const StatePlace& place, int threads) {
  const int blocks = (d.value_dim + COLUMNS - 1) / COLUMNS;
  const int64_t work = (rows.starts[rows.count] + rows.count) * d.value_heads * d.key_dim;
  run(work * d.value_dim < 1 << 15 ? 1 : threads, [&](Team& team) {
    team.share(int(rows.count) * d.value_heads * blocks, 1, [&](int begin, int end) {
      for (int item = begin; item < end; item++) {
        const int column = item % blocks * COLUMNS, head = item / blocks % d.value_heads;
        const int64_t row = item / blocks / d.value_heads;
        const int columns = std::min(COLUMNS, d.value_dim - column);
        const int vectors = (columns + W - 1) / W;
        if (vectors == 1) run_block<T, 1>(d, rows, place, row, head, column, columns);
        if (vectors == 2) run_block<T, 2>(d, rows, place, row, head, column, columns);
        if (vectors == 3) run_block<T, 3>(d, rows, place, row, head, column, columns);
        if (vectors == 4) run_block<T, 4>(d, rows, place, row, head, column, columns);
      }
    });
  });
}

}  // namespace

FL_EXPORT void fairlead_gated_delta(const Delta* d, const StateRows* rows, const StatePlace* place,
                                    int threads) {
  if (d->half) {
    run_rows<bfloat16>(*d, *rows, *place, threads);
  } else {
    run_rows<float>(*d, *rows, *place, threads);
  }
}
