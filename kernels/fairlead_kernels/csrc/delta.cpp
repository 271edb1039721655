// The gated delta rule (S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024), token by
// token over packed sequences with states.
//
// A task is one sequence, one head of values and a block of its columns, whose part of the state
// stays in the caches of one core. Each column is computed by itself, in the order of the tokens.
// A single token goes over the state of a whole head where it lies, in order: memory is what it
// waits for.
#include <cmath>

#include "export.h"
#include "simd.h"
#include "states.h"
#include "team.h"

using namespace fairlead;

namespace {

constexpr int VECTORS = 4;  // of a block
constexpr int COLUMNS = VECTORS * W;
// Of a single token: half as many as there are registers for two sums of each.
constexpr int WIDE = W == 16 ? 8 : 4;
// Bytes before their use at which a single token's state is fetched.
constexpr int AHEAD = 2048;

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

// One token: the columns' values and their state [rows, N · W] in `from`, `stride` floats from row to
// row, which becomes that in `to`, the same place or another → what it gives. SINGLE: nothing reads
// the state again soon, so it is fetched ahead, and stored past the caches where `to` may be.
template <int N, bool SINGLE>
void step(const float* from, float* to, int64_t stride, int rows, const float* q, const float* k,
          float decay, float beta, const float* v, float* out) {
  // Two sums of each column, of even and of odd rows: one would wait for itself.
  Vec kept[2][N] = {}, given[2][N] = {}, change[N];
  int row = 0;
  for (; row + 2 <= rows; row += 2) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      const float* place = from + (row + part) * stride;
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        if (SINGLE) __builtin_prefetch(reinterpret_cast<const char*>(place + n * W) + AHEAD);
        kept[part][n] += load(place + n * W) * k[row + part];
      }
    }
  }
  if (row < rows) {
    for (int n = 0; n < N; n++) kept[0][n] += load(from + row * stride + n * W) * k[row];
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++) {
    change[n] = (load(v + n * W) - (kept[0][n] + kept[1][n]) * decay) * beta;
  }
  const auto put = [](float* place, Vec value) {
    if (SINGLE) {
      store_past_caches(place, value);
    } else {
      store(place, value);
    }
  };
  for (row = 0; row + 2 <= rows; row += 2) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        const int64_t at = (row + part) * stride + n * W;
        const Vec next = load(from + at) * decay + change[n] * k[row + part];
        put(to + at, next);
        given[part][n] += next * q[row + part];
      }
    }
  }
  if (row < rows) {
    for (int n = 0; n < N; n++) {
      const int64_t at = row * stride + n * W;
      const Vec next = load(from + at) * decay + change[n] * k[row];
      put(to + at, next);
      given[0][n] += next * q[row];
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++) store(out + n * W, given[0][n] + given[1][n]);
}

// The vectors of one token and one head: in memory for `floats_of` of them.
struct Token {
  float *q, *k, *v, *given;
  float decay, beta;

  static size_t floats_of(const Delta& d, int columns) {
    return size_t(2 * padded(d) + 2 * columns);
  }
  static int padded(const Delta& d) { return (d.key_dim + W - 1) / W * W; }

  Token(const Delta& d, int columns, float* memory)
      : q(memory), k(q + padded(d)), v(k + padded(d)), given(v + columns) {
    std::fill(v, v + columns, 0.0f);
  }

  template <class T>
  void read(const Delta& d, int64_t t, int head, int column, int columns) {
    const int key_head = head / (d.value_heads / d.key_heads);
    read_vector(static_cast<const T*>(d.q) + t * d.q_stride + key_head * d.key_dim, d.key_dim,
                d.scale, d.normalizes, q);
    read_vector(static_cast<const T*>(d.k) + t * d.k_stride + key_head * d.key_dim, d.key_dim, 1.0f,
                d.normalizes, k);
    const T* values = static_cast<const T*>(d.v) + t * d.v_stride + head * d.value_dim + column;
    for (int i = 0; i < columns; i++) v[i] = to_float(values[i]);
    const int64_t gate = t * d.value_heads + head;
    decay = exp(splat(d.g[gate]))[0];
    beta = d.beta[gate];
  }

  template <class T>
  void write(const Delta& d, int64_t t, int head, int column, int columns) const {
    T* out = static_cast<T*>(d.out) + (t * d.value_heads + head) * d.value_dim + column;
    for (int i = 0; i < columns; i++) from_float(given[i], out + i);
  }
};

template <class T, int N>
void run_block(const Delta& d, const StateRows& rows, const StatePlace& place, int64_t row,
               int head, int column, int columns) {
  constexpr int stride = N * W;
  float* state = scratch(size_t(d.key_dim) * stride + Token::floats_of(d, stride));
  Token token(d, stride, state + d.key_dim * stride);
  const int64_t at = int64_t(head) * d.key_dim * d.value_dim * 4;
  if (rows.begins[row]) {
    std::fill(state, state + d.key_dim * stride, 0.0f);
  } else {
    read_columns(place, rows.source + row * rows.units, at, d.key_dim, d.value_dim, column, columns,
                 stride, state);
  }
  for (int64_t t = rows.starts[row]; t < rows.starts[row + 1]; t++) {
    token.read<T>(d, t, head, column, columns);
    step<N, false>(state, state, stride, d.key_dim, token.q, token.k, token.decay, token.beta,
                   token.v, token.given);
    token.write<T>(d, t, head, column, columns);
  }
  write_columns(place, rows.target + row * rows.units, at, d.key_dim, d.value_dim, column, columns,
                stride, state);
}

// The state of a head behind a sequence's token, if it is one and the state is whole vectors in one
// piece, before and behind it; else null.
inline float* single_target(const Delta& d, const StateRows& rows, const StatePlace& place,
                            int64_t row, int head) {
  const int64_t nbytes = int64_t(d.key_dim) * d.value_dim * 4;
  const bool single = rows.starts[row + 1] - rows.starts[row] == 1 && !rows.begins[row];
  if (!single || d.value_dim % W != 0) return nullptr;
  const int64_t *source = rows.source + row * rows.units, *target = rows.target + row * rows.units;
  uint8_t* to = in_one_unit(place, target, head * nbytes, nbytes);
  const bool whole = in_one_unit(place, source, head * nbytes, nbytes) != nullptr;
  return whole && reinterpret_cast<uintptr_t>(to) % (4 * W) == 0 ? reinterpret_cast<float*>(to)
                                                                  : nullptr;
}

// A head of a sequence of one token, whose state goes to `to`.
template <class T>
void run_single(const Delta& d, const StateRows& rows, const StatePlace& place, int64_t row,
                int head, float* to) {
  constexpr int columns = WIDE * W;
  const int64_t t = rows.starts[row], nbytes = int64_t(d.key_dim) * d.value_dim * 4;
  const float* from = reinterpret_cast<const float*>(
      in_one_unit(place, rows.source + row * rows.units, head * nbytes, nbytes));
  Token token(d, columns, scratch(Token::floats_of(d, columns)));
  for (int column = 0; column < d.value_dim; column += columns) {
    const int count = std::min(columns, d.value_dim - column);
    token.read<T>(d, t, head, column, count);
    const auto compute = [&](auto vectors, int at) {
      step<vectors.value, true>(from + column + at, to + column + at, d.value_dim, d.key_dim,
                                token.q, token.k, token.decay, token.beta, token.v + at,
                                token.given + at);
    };
    if (count == columns) {
      compute(std::integral_constant<int, WIDE>(), 0);
    } else {
      for (int at = 0; at < count; at += W) compute(std::integral_constant<int, 1>(), at);
    }
    token.write<T>(d, t, head, column, count);
  }
  end_streams();
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
        // The first block's task is that of the whole head.
        if (float* to = single_target(d, rows, place, row, head); to != nullptr) {
          if (column == 0) run_single<T>(d, rows, place, row, head, to);
          continue;
        }
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
