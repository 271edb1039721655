// Tensors of the states of sequences, in units of a pool that need not lie side by side
// (interface/states.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fairlead {

struct StatePlace {
  uint8_t* pool;  // [units, unit_bytes]
  int64_t unit_bytes;
  int64_t offset;  // of the tensor, in a sequence's run of bytes
};

struct StateRows {
  const int64_t* starts;   // [count + 1]
  const int64_t* prompts;  // [count]
  const uint8_t* begins;   // [count]
  const int64_t* source;   // [count, units]
  const int64_t* target;   // [count, units]
  int64_t count;
  int64_t units;
};

// Where the bytes `at` to before `at + nbytes` of a tensor lie in a sequence's `units`, or null if
// they are over two of them.
inline uint8_t* in_one_unit(const StatePlace& place, const int64_t* units, int64_t at,
                            int64_t nbytes) {
  at += place.offset;
  const int64_t unit = at / place.unit_bytes, within = at % place.unit_bytes;
  if (within + nbytes > place.unit_bytes) return nullptr;
  return place.pool + units[unit] * place.unit_bytes + within;
}

// Calls `copy(place in the pool, bytes done, bytes)` for each unit that has some of these bytes.
template <class Copy>
inline void each_unit(const StatePlace& place, const int64_t* units, int64_t at, int64_t nbytes,
                      Copy copy) {
  at += place.offset;
  for (int64_t done = 0; done < nbytes;) {
    const int64_t unit = (at + done) / place.unit_bytes, within = (at + done) % place.unit_bytes;
    const int64_t part = std::min(nbytes - done, place.unit_bytes - within);
    copy(place.pool + units[unit] * place.unit_bytes + within, done, part);
    done += part;
  }
}

inline void read_state(const StatePlace& place, const int64_t* units, int64_t at, int64_t nbytes,
                       void* to) {
  each_unit(place, units, at, nbytes, [&](const uint8_t* from, int64_t done, int64_t part) {
    memcpy(static_cast<uint8_t*>(to) + done, from, size_t(part));
  });
}

inline void write_state(const StatePlace& place, const int64_t* units, int64_t at, int64_t nbytes,
                        const void* from) {
  each_unit(place, units, at, nbytes, [&](uint8_t* to, int64_t done, int64_t part) {
    memcpy(to, static_cast<const uint8_t*>(from) + done, size_t(part));
  });
}

// Stores a vector at a multiple of its size without reading the line that it is in, or keeping it.
FL_INLINE void store_past_caches(float* p, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
#elif defined(__AVX__)
  _mm256_stream_ps(p, reinterpret_cast<__m256>(v));
#elif defined(__SSE2__)
  _mm_stream_ps(p, reinterpret_cast<__m128>(v));
#else
  store(p, v);
#endif
}

// Lets other threads see what was written past the caches.
inline void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// A matrix float [rows, width] of a state, from byte `at` of its tensor on: its columns from
// `column` on, `count` of them, as rows of `stride` floats in `matrix`. What lies behind them is
// zero.
inline void read_columns(const StatePlace& place, const int64_t* units, int64_t at, int64_t rows,
                         int64_t width, int64_t column, int64_t count, int64_t stride,
                         float* matrix) {
  const uint8_t* whole = in_one_unit(place, units, at, rows * width * 4);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t first = (row * width + column) * 4;
    float* to = matrix + row * stride;
    if (whole != nullptr) {
      memcpy(to, whole + first, size_t(count) * 4);
    } else {
      read_state(place, units, at + first, count * 4, to);
    }
    std::fill(to + count, to + stride, 0.0f);
  }
}

inline void write_columns(const StatePlace& place, const int64_t* units, int64_t at, int64_t rows,
                          int64_t width, int64_t column, int64_t count, int64_t stride,
                          const float* matrix) {
  uint8_t* whole = in_one_unit(place, units, at, rows * width * 4);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t first = (row * width + column) * 4;
    const float* from = matrix + row * stride;
    if (whole != nullptr) {
      memcpy(whole + first, from, size_t(count) * 4);
    } else {
      write_state(place, units, at + first, count * 4, from);
    }
  }
}

}  // namespace fairlead
