// Residual and norm of each row, and norms with a gate.
#include "norm.h"

#include "activation.h"
#include "export.h"
#include "team.h"

using namespace fairlead;

namespace {

template <class T>
void normalize_rows(const T* x, const T* residual, const NormOf<T>& norm, int64_t count,
                    int64_t width, T* total, T* out, int threads) {
  const int n = int(width);
  // A thread is worth waking for some tens of microseconds only.
  run(count * width < 1 << 15 ? 1 : threads, [&](Team& team) {
    team.share(int(count), 4, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        const T* in = x + row * width;
        if (residual != nullptr) {
          const T* add = residual + row * width;
          T* sum = total + row * width;
          int i = 0;
          for (; i + W <= n; i += W) store(sum + i, load(in + i) + load(add + i));
          for (; i < n; i++) from_float(to_float(in[i]) + to_float(add[i]), sum + i);
          in = sum;
        }
        normalize(in, norm, n, out + row * width);
      }
    });
  });
}

// Each group of columns of x times silu(gate), or of x where the gate comes `last`, is normalized
// by its part of the norm's vectors; then the gate that comes last multiplies it.
template <class T, class Gate>
void gate_rows(const T* x, const Gate* gate, const NormOf<Gate>& norm, int64_t count, int64_t width,
               int64_t group, bool last, T* out, int threads) {
  run(count * width < 1 << 14 ? 1 : threads, [&](Team& team) {
    float* const values = scratch(size_t(width));
    team.share(int(count), 4, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        const T* in = x + row * width;
        const Gate* gates = gate + row * width;
        const auto gated = [&](auto* from, int64_t i, bool gates_here) {
          const Vec value = load_at(from, i, width);
          return gates_here ? value * activate(load_at(gates, i, width), SILU) : value;
        };
        for (int64_t i = 0; i < width; i += W) store_at(values, gated(in, i, !last), i, width);
        for (int64_t i = 0; i < width; i += group) {
          NormOf<Gate> part = norm;
          part.weight += i;
          if (part.bias != nullptr) part.bias += i;
          normalize(values + i, part, int(group), values + i);
        }
        for (int64_t i = 0; i < width; i += W) {
          store_at(out + row * width, gated(values, i, last), i, width);
        }
      }
    });
  });
}

}  // namespace

// total [count, width] = x + residual, or x where there is no residual (then `total` is not
// written and may be null); out = the norm of total. `total` may be x or residual. All of these and
// the norm's vectors are bfloat16 where `half`.
FL_EXPORT void fairlead_norm(const void* x, const void* residual, const void* norm, int64_t count,
                             int64_t width, void* total, void* out, int half, int threads) {
  with_type(half, [&](auto number) {
    using T = decltype(number);
    normalize_rows(static_cast<const T*>(x), static_cast<const T*>(residual),
                   *static_cast<const NormOf<T>*>(norm), count, width, static_cast<T*>(total),
                   static_cast<T*>(out), threads);
  });
}

// out [count, width] = the norm of each group of columns of x * silu(gate), or norm * silu(gate)
// where the gate comes `last`. x and out are bfloat16 where `half`, the gate and the norm's vectors
// [width] where `half_gate`.
FL_EXPORT void fairlead_gated_norm(const void* x, const void* gate, const void* norm, int64_t count,
                                   int64_t width, int64_t group, int last, void* out, int half,
                                   int half_gate, int threads) {
  with_type(half, [&](auto number) {
    with_type(half_gate, [&](auto gate_number) {
      using T = decltype(number);
      using Gate = decltype(gate_number);
      gate_rows(static_cast<const T*>(x), static_cast<const Gate*>(gate),
                *static_cast<const NormOf<Gate>*>(norm), count, width, group, last,
                static_cast<T*>(out), threads);
    });
  });
}
