// The scan of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024) in its recurrent form, over
// ragged rows with states in units of a pool.
//
// A task is a block of rows of one head's state of one sequence, token by token: so its results
// depend on nothing but the sequence.
#include "export.h"
#include "scan.h"
#include "team.h"

using namespace fairlead;

// Inputs are rows, `*_stride` elements from one token to the next, of float or of bfloat16.
struct Ssd {
  const void* x;   // [T, heads · dim]
  const void* dt;  // [T, heads]
  const void* b;   // [T, groups · size]
  const void* c;   // [T, groups · size]
  int64_t x_stride;
  int64_t dt_stride;
  int64_t b_stride;
  int64_t c_stride;
  const float* a;     // [heads]
  const float* d;     // [heads] or null
  const float* bias;  // of time steps, [heads] or null
  float* out;         // [T, heads · dim]
  int32_t heads;
  int32_t dim;
  int32_t groups;
  int32_t size;
  float least;  // bounds of the time steps of prompts
  float most;
  int32_t softplus;
  int32_t half;
};

namespace {

// Rows of the state whose sums a pass over `size` keeps in registers.
constexpr int ROWS = W == 16 ? 8 : 4;

// One token: of W rows of the state [W, padded], which becomes state · decay + x ⊗ b, the
// products with c.
FL_INLINE Vec step(float* state, int64_t padded, Vec decay, const float* x, const float* b,
                   const float* c) {
  Vec products[W];
#pragma GCC unroll 4
  for (int first = 0; first < W; first += ROWS) {
    float* const rows = state + first * padded;
    Vec total[ROWS] = {};
    for (int64_t i = 0; i < padded; i += W) {
      const Vec b_part = load(b + i), c_part = load(c + i);
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; row++) {
        float* const at = rows + row * padded + i;
        const Vec value = load(at) * decay + b_part * x[first + row];
        store(at, value);
        total[row] += value * c_part;
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) products[first + row] = total[row];
  }
  return sums(products);
}

// Rows `first` to before `end` of a head's state, over all tokens of a sequence.
template <class T>
void scan(const Ssd& s, const StateRows& rows, const StatePlace& place, int sequence, int head,
          int64_t first, int64_t end) {
  const int64_t count = end - first, padded = whole(s.size);
  float* const state = scratch(size_t((whole(count) + 2) * padded));
  float *const b = state + whole(count) * padded, *const c = b + padded;
  const int64_t first_row = int64_t(head) * s.dim + first;
  read_rows(rows, place, sequence, first_row, count, s.size, state);
  const int group = head / (s.heads / s.groups);
  const T *const x = static_cast<const T*>(s.x) + first_row;
  const T *const dt = static_cast<const T*>(s.dt) + head;
  const T *const b_rows = static_cast<const T*>(s.b) + int64_t(group) * s.size;
  const T *const c_rows = static_cast<const T*>(s.c) + int64_t(group) * s.size;
  const int64_t begin = rows.starts[sequence], after = rows.starts[sequence + 1];
  const int64_t generated = begin + rows.prompts[sequence];
  const float bias = s.bias == nullptr ? 0.0f : s.bias[head];
  const float skip = s.d == nullptr ? 0.0f : s.d[head];
  for (int64_t part = begin; part < after; part += W) {  // time steps, a vector of tokens at once
    const int tokens = int(after - part < W ? after - part : W);
    Vec steps = gather(dt + part * s.dt_stride, s.dt_stride, tokens) + bias;
    if (s.softplus) steps = softplus(steps);
    const Vec bounded = steps < s.least ? splat(s.least) : steps > s.most ? splat(s.most) : steps;
    const int64_t of_prompt = generated - part;
    steps = below(0, int(of_prompt < 0 ? 0 : of_prompt > W ? W : of_prompt)) ? bounded : steps;
    const Vec decays = exp(steps * s.a[head]);
    for (int i = 0; i < tokens; i++) {
      const int64_t t = part + i;
      spread(b_rows + t * s.b_stride, s.size, b);
      spread(c_rows + t * s.c_stride, s.size, c);
      const Vec decay = splat(decays[i]);
      for (int64_t row = 0; row < count; row += W) {
        const Vec input = load_at(x + t * s.x_stride, row, count);
        float scaled[W];
        store(scaled, input * steps[i]);
        const Vec product = step(state + row * padded, padded, decay, scaled, b, c);
        store_at(s.out + (t * s.heads * s.dim + first_row), product + input * skip, row, count);
      }
    }
  }
  write_rows(rows, place, sequence, first_row, count, s.size, state);
}

}  // namespace

// out = the scan of each of the sequences; the state [heads, dim, size] of a head becomes state ·
// e^(a · dt) + dt · x ⊗ b at each token.
FL_EXPORT void fairlead_ssd(const Ssd* ssd, const StateRows* rows, const StatePlace* place,
                            int threads) {
  const Ssd& s = *ssd;
  const int64_t block = block_rows(s.dim, whole(s.size));
  const int blocks = int((s.dim + block - 1) / block);
  const int64_t work = (rows->starts[rows->count] + rows->count) * s.heads * s.dim * s.size;
  run(work < 1 << 16 ? 1 : threads, [&](Team& team) {
    team.share(int(rows->count) * s.heads * blocks, 1, [&](int begin, int end) {
      for (int task = begin; task < end; task++) {
        const int sequence = task / (s.heads * blocks), head = task / blocks % s.heads;
        const int64_t first = task % blocks * block;
        const int64_t last = first + block < s.dim ? first + block : s.dim;
        if (s.half) {
          scan<bfloat16>(s, *rows, *place, sequence, head, first, last);
        } else {
          scan<float>(s, *rows, *place, sequence, head, first, last);
        }
      }
    });
  });
}
