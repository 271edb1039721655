// The selective scan of Mamba 1 (Gu and Dao, "Mamba", 2023), over ragged rows with states in units
// of a pool.
//
// A task is a block of channels of one sequence, token by token: so its results depend on nothing
// but the sequence.
#include "activation.h"
#include "export.h"
#include "scan.h"
#include "team.h"

using namespace fairlead;

// Inputs are rows, `*_stride` elements from one token to the next, of float or of bfloat16.
struct Selective {
  const void* x;   // [T, channels]
  const void* dt;  // [T, channels], `dt_column` elements from one channel to the next
  const void* b;   // [T, size]
  const void* c;   // [T, size]
  const void* z;   // [T, channels] or null
  int64_t x_stride;
  int64_t dt_stride;
  int64_t dt_column;
  int64_t b_stride;
  int64_t c_stride;
  int64_t z_stride;
  const float* a;     // [channels, size]
  const float* d;     // [channels] or null
  const float* bias;  // of time steps, [channels] or null
  float* out;         // [T, channels]
  int32_t channels;
  int32_t size;
  int32_t softplus;
  int32_t half;
};

namespace {

constexpr int ROWS = W == 16 ? 8 : 4;  // channels whose sums a pass over `size` keeps in registers

// One token: of W channels' states [W, padded], each of which becomes state · e^(a · dt) + x · b,
// the products with c.
FL_INLINE Vec step(float* state, const float* a, int64_t padded, const float* dt, const float* x,
                   const float* b, const float* c) {
  Vec products[W];
#pragma GCC unroll 4
  for (int first = 0; first < W; first += ROWS) {
    Vec total[ROWS] = {};
    for (int64_t i = 0; i < padded; i += W) {
      const Vec b_part = load(b + i), c_part = load(c + i);
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; row++) {
        const int64_t at = (first + row) * padded + i;
        const Vec decay = exp(load(a + at) * dt[first + row]);
        const Vec value = load(state + at) * decay + b_part * x[first + row];
        store(state + at, value);
        total[row] += value * c_part;
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) products[first + row] = total[row];
  }
  return sums(products);
}

// Channels `first` to before `end` of all tokens of a sequence.
template <class T>
void scan(const Selective& s, const StateRows& rows, const StatePlace& place, int sequence,
          int64_t first, int64_t end) {
  const int64_t count = end - first, padded = whole(s.size);
  const int64_t block = whole(count) * padded;
  float* const state = scratch(size_t(2 * block + 2 * padded));
  float *const a = state + block, *const b = a + block, *const c = b + padded;
  std::fill(a, a + block, 0.0f);
  for (int64_t row = 0; row < count; row++) {
    memcpy(a + row * padded, s.a + (first + row) * s.size, size_t(s.size) * sizeof(float));
  }
  read_rows(rows, place, sequence, first, count, s.size, state);
  const T *const x = static_cast<const T*>(s.x) + first, *const z = static_cast<const T*>(s.z);
  const T *const dt = static_cast<const T*>(s.dt) + first * s.dt_column;
  const T *const b_rows = static_cast<const T*>(s.b), *const c_rows = static_cast<const T*>(s.c);
  for (int64_t t = rows.starts[sequence]; t < rows.starts[sequence + 1]; t++) {
    spread(b_rows + t * s.b_stride, s.size, b);
    spread(c_rows + t * s.c_stride, s.size, c);
    for (int64_t row = 0; row < count; row += W) {
      const int width = int(count - row < W ? count - row : W);
      const Vec input = load_at(x + t * s.x_stride, row, count);
      Vec steps = gather(dt + t * s.dt_stride + row * s.dt_column, s.dt_column, width);
      if (s.bias != nullptr) steps += load_at(s.bias + first, row, count);
      if (s.softplus) steps = softplus(steps);
      float scaled[W], times[W];
      store(times, steps);
      store(scaled, steps * input);
      Vec out = step(state + row * padded, a + row * padded, padded, times, scaled, b, c);
      if (s.d != nullptr) out += input * load_at(s.d + first, row, count);
      if (z != nullptr) out *= activate(load_at(z + t * s.z_stride + first, row, count), SILU);
      store_at(s.out + (t * s.channels + first), out, row, count);
    }
  }
  write_rows(rows, place, sequence, first, count, s.size, state);
}

}  // namespace

// out = the scan of each of the sequences; the state [channels, size] of a channel becomes state ·
// e^(a · dt) + dt · x · b at each token. With z, out is times silu(z).
FL_EXPORT void fairlead_selective(const Selective* selective, const StateRows* rows,
                                  const StatePlace* place, int threads) {
  const Selective& s = *selective;
  const int64_t most = block_rows(s.channels, whole(s.size));
  const int64_t block = most < 64 ? most : 64;  // channels enough for a cache line of each input
  const int blocks = int((s.channels + block - 1) / block);
  const int64_t work = (rows->starts[rows->count] + rows->count) * s.channels * s.size;
  run(work < 1 << 13 ? 1 : threads, [&](Team& team) {
    team.share(int(rows->count) * blocks, 1, [&](int begin, int end) {
      for (int task = begin; task < end; task++) {
        const int64_t first = task % blocks * block;
        const int64_t last = first + block < s.channels ? first + block : s.channels;
        if (s.half) {
          scan<bfloat16>(s, *rows, *place, task / blocks, first, last);
        } else {
          scan<float>(s, *rows, *place, task / blocks, first, last);
        }
      }
    });
  });
}
