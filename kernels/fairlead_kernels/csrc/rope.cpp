// Norm and rotation of queries and keys, and the write of keys and values.
#include "rope.h"

#include "export.h"
#include "team.h"

using namespace fairlead;

namespace {

template <class T>
void rope_write(float* qkv, int64_t count, int query, int kv, int dim, const float* cos,
                const float* sin, int rotated, const Norm& q_norm, const Norm& k_norm,
                const int64_t* slots, T* keys, T* values, int threads) {
  const int64_t width = int64_t(query + 2 * kv) * dim;
  run(count * width < 1 << 15 ? 1 : threads, [&](Team& team) {
    team.share(int(count), 4, [&](int begin, int end) {
      for (int64_t t = begin; t < end; t++) {
        rope_write_token(qkv + t * width, query, kv, dim, cos + t * rotated, sin + t * rotated,
                         rotated, q_norm, k_norm, slots[t], keys, values);
      }
    });
  });
}

}  // namespace

// qkv [count, (query + 2 kv) · dim] is changed in place: queries and keys are normalized, where
// there is a weight, and rotated. `half`: the caches hold bfloat16.
FL_EXPORT void fairlead_rope_write(float* qkv, int64_t count, int query, int kv, int dim,
                                    const float* cos, const float* sin, int rotated,
                                    const Norm* q_norm, const Norm* k_norm, const int64_t* slots,
                                    void* keys, void* values, int half, int threads) {
  if (half) {
    rope_write(qkv, count, query, kv, dim, cos, sin, rotated, *q_norm, *k_norm, slots,
               static_cast<bfloat16*>(keys), static_cast<bfloat16*>(values), threads);
  } else {
    rope_write(qkv, count, query, kv, dim, cos, sin, rotated, *q_norm, *k_norm, slots,
               static_cast<float*>(keys), static_cast<float*>(values), threads);
  }
}
