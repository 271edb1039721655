// Rotary position embedding (Su et al., 2021) in Llama's layout, and the write of the cache.
#pragma once

#include "attention.h"
#include "norm.h"

namespace fairlead {

// One step's places: cos and sin [T, rotated], both halves given; slots [T].
struct Rope {
  const float* cos;
  const float* sin;
  int rotated;  // at most dim
};

// Rotates one head in place: element i < rotated/2 with element i + rotated/2.
inline void rotate(float* head, const float* cos, const float* sin, int rotated) {
  const int half = rotated / 2;
  int i = 0;
  for (; i + W <= half; i += W) {
    const Vec a = load(head + i), b = load(head + half + i);
    store(head + i, a * load(cos + i) - b * load(sin + i));
    store(head + half + i, b * load(cos + half + i) + a * load(sin + half + i));
  }
  for (; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

template <class T>
void write_head(const float* head, int dim, T* out) {
  for (int i = 0; i < dim; i++) from_float(head[i], out + i);
}

// One token: normalizes and rotates its queries and keys in place in qkv [(query + 2 kv) · dim],
// and writes keys and values into slot `slot` of the caches. A null `cos` leaves the heads as they
// are.
template <class T>
void rope_write_token(float* qkv, int query, int kv, int dim, const float* cos, const float* sin,
                      int rotated, const Norm& q_norm, const Norm& k_norm, int64_t slot,
                      const Caches& caches) {
  for (int head = 0; head < query + kv; head++) {
    const Norm& norm = head < query ? q_norm : k_norm;
    float* x = qkv + head * dim;
    if (norm.weight != nullptr) normalize(x, norm, dim, x);
    if (cos != nullptr) rotate(x, cos, sin, rotated);
  }
  const int width = kv * dim;
  write_head(qkv + int64_t(query) * dim, width,
             static_cast<T*>(caches.keys) + slot * caches.key_stride);
  write_head(qkv + int64_t(query + kv) * dim, width,
             static_cast<T*>(caches.values) + slot * caches.value_stride);
}

}  // namespace fairlead
