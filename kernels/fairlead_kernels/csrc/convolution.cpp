// A causal convolution of each channel by itself, over packed sequences with states.
#include "activation.h"
#include "export.h"
#include "states.h"
#include "team.h"

using namespace fairlead;

namespace {

constexpr int BLOCK = 64;  // channels of a task
constexpr int VECTORS = BLOCK / W;

struct Convolution {
  const void* x;       // [tokens, channels]
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels] or null
  void* out;           // [tokens, channels]
  int64_t channels;
  int32_t taps;
  int32_t half;  // all of these, and the state [channels, taps - 1], are bfloat16
  int32_t activated;
};

FL_INLINE Vec rounded(Vec v, const float*) { return v; }
FL_INLINE Vec rounded(Vec v, const bfloat16*) {
  bfloat16 values[W];
  store(values, v);
  return load(values);
}

// Calls `work` with the constant 1 to 4 that `taps` is, so that its loops over them become a few
// instructions for many channels, or with `taps` itself.
template <class Work>
FL_INLINE void with_taps(int taps, Work work) {
  if (taps == 1) return work(std::integral_constant<int, 1>());
  if (taps == 2) return work(std::integral_constant<int, 2>());
  if (taps == 3) return work(std::integral_constant<int, 3>());
  if (taps == 4) return work(std::integral_constant<int, 4>());
  work(taps);
}

// to [taps, BLOCK] = from [count, taps], the other way round.
template <class T>
void by_tap(const T* __restrict from, int64_t count, int taps, float* __restrict to) {
  with_taps(taps, [&](auto constant) __attribute__((always_inline)) {
    const int n = constant;
    for (int64_t i = 0; i < count; i++) {
      for (int j = 0; j < n; j++) to[j * BLOCK + i] = to_float(from[i * n + j]);
    }
  });
}

// One block of channels: `weights` [taps + 1, BLOCK] are those of each tap, then the bias.
template <class T>
struct Block {
  const Convolution& c;
  int64_t first;  // of its channels
  int64_t count;
  float* weights;
  float* kept;  // [taps - 1, BLOCK]: the inputs before the first token's, oldest first
  T* state;     // [count, taps - 1]: the same, as states hold them

  void read_weights() {
    const T* weight = static_cast<const T*>(c.weight) + first * c.taps;
    const T* bias = static_cast<const T*>(c.bias);
    std::fill(weights, weights + (c.taps + 1) * BLOCK, 0.0f);
    by_tap(weight, count, c.taps, weights);
    if (bias == nullptr) return;
    for (int64_t i = 0; i < count; i++) weights[c.taps * BLOCK + i] = to_float(bias[first + i]);
  }

  void run(const StateRows& rows, const StatePlace& place, int64_t row) {
    const int before = c.taps - 1;
    const int64_t begin = rows.starts[row], tokens = rows.starts[row + 1] - begin;
    const int64_t at = first * before * int64_t(sizeof(T)), nbytes = count * before * sizeof(T);
    const T* x = static_cast<const T*>(c.x) + begin * c.channels + first;
    T* out = static_cast<T*>(c.out) + begin * c.channels + first;
    std::fill(kept, kept + before * BLOCK, 0.0f);
    if (!rows.begins[row]) {
      read_state(place, rows.source + row * rows.units, at, nbytes, state);
      by_tap(state, count, before, kept);
    }
    for (int64_t t = 0; t < tokens; t++) {
      for (int v = 0; v < VECTORS && v * W < count; v++) {
        const int at_channel = v * W;
        Vec total = load(weights + c.taps * BLOCK + at_channel);
        for (int tap = 0; tap < c.taps; tap++) {
          const int64_t input = t + tap - before;
          const Vec value = input < 0 ? load(kept + (input + before) * BLOCK + at_channel)
                                      : load_at(x + input * c.channels, at_channel, count);
          total += load(weights + tap * BLOCK + at_channel) * value;
        }
        if (c.activated) total = activate(rounded(total, out), SILU);
        store_at(out + t * c.channels, total, at_channel, count);
      }
    }
    with_taps(before, [&](auto constant) __attribute__((always_inline)) {
      const int n = constant;
      for (int j = 0; j < n; j++) {
        const int64_t input = tokens + j - before;
        const float* older = kept + (input + before) * BLOCK;
        const T* newer = x + input * c.channels;
        if (input < 0) {
          for (int64_t i = 0; i < count; i++) from_float(older[i], state + i * n + j);
        } else {
          for (int64_t i = 0; i < count; i++) state[i * n + j] = newer[i];
        }
      }
    });
    write_state(place, rows.target + row * rows.units, at, nbytes, state);
  }

  // Fetches the state of a row from memory, and makes room for the one behind it.
  void fetch(const StateRows& rows, const StatePlace& place, int64_t row) const {
    const int64_t channel = (c.taps - 1) * int64_t(sizeof(T));
    const auto lines = [](uint8_t* from, int64_t, int64_t part) {
      for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(from + i, 1);
    };
    each_unit(place, rows.source + row * rows.units, first * channel, count * channel, lines);
    each_unit(place, rows.target + row * rows.units, first * channel, count * channel, lines);
  }
};

template <class T>
void convolve(const Convolution& c, const StateRows& rows, const StatePlace& place, int threads) {
  const int64_t blocks = (c.channels + BLOCK - 1) / BLOCK;
  const int64_t tokens = rows.starts[rows.count];
  run(tokens * c.channels < 1 << 14 ? 1 : threads, [&](Team& team) {
    // Of one block after the other all sequences: its weights are read once for many of them.
    const int grain = int(std::clamp<int64_t>(rows.count, 1, 32));
    team.share(int(blocks * rows.count), grain, [&](int begin, int end) {
      float* memory = scratch(size_t(3 * c.taps + 1) * BLOCK);
      int64_t last = -1;
      for (int64_t item = begin; item < end; item++) {
        const int64_t index = item / rows.count, first = index * BLOCK;
        Block<T> block{c,
                       first,
                       std::min<int64_t>(BLOCK, c.channels - first),
                       memory,
                       memory + (c.taps + 1) * BLOCK,
                       reinterpret_cast<T*>(memory + 2 * c.taps * BLOCK)};
        if (index != last) block.read_weights();
        last = index;
        if (item + 1 < end && item % rows.count + 1 < rows.count) {
          block.fetch(rows, place, item % rows.count + 1);
        }
        block.run(rows, place, item % rows.count);
      }
    });
  });
}

}  // namespace

FL_EXPORT void fairlead_convolution(const Convolution* c, const StateRows* rows,
                                    const StatePlace* place, int threads) {
  if (c->half) {
    convolve<bfloat16>(*c, *rows, *place, threads);
  } else {
    convolve<float>(*c, *rows, *place, threads);
  }
}
