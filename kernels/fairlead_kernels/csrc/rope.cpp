// Norm and rotation of queries and keys, and the write of keys and values.
#include "rope.h"

#include "export.h"
#include "team.h"

using namespace fairlead;

namespace {

template <class T>
void rope_write(float* qkv, int64_t count, int query, int kv, int dim, const float* cos,
                const float* sin, int rotated, const Norm& q_norm, const Norm& k_norm,
                const int64_t* slots, const Caches& caches, int threads) {
  const int64_t width = int64_t(query + 2 * kv) * dim;
  run(count * width < 1 << 15 ? 1 : threads, [&](Team& team) {
    team.share(int(count), 4, [&](int begin, int end) {
      for (int64_t t = begin; t < end; t++) {
        rope_write_token<T>(qkv + t * width, query, kv, dim, cos + t * rotated, sin + t * rotated,
                            rotated, q_norm, k_norm, slots[t], caches);
      }
    });
  });
}

}  // namespace

// qkv [count, (query + 2 kv) · dim] is changed in place: queries and keys are normalized, where
// there is a weight, and rotated.
FL_EXPORT void fairlead_rope_write(float* qkv, int64_t count, int query, int kv, int dim,
                                    const float* cos, const float* sin, int rotated,
                                    const Norm* q_norm, const Norm* k_norm, const int64_t* slots,
                                    const Caches* caches, int threads) {
  const auto write = caches->half ? rope_write<bfloat16> : rope_write<float>;
  write(qkv, count, query, kv, dim, cos, sin, rotated, *q_norm, *k_norm, slots, *caches, threads);
}
