// Linear layers on packed weights: packing, and x · weightᵀ + bias.
#include "linear.h"

#include <sys/mman.h>
#include <unistd.h>

#include "export.h"

using namespace fairlead;

// Outputs per panel: rows of a packed weight are padded to a multiple of it.
FL_EXPORT int fairlead_panel_width() { return P; }

// Asks for large pages behind `bytes` of memory that is not written yet: a weight is read at the
// speed of memory only if the addresses' translations are cached.
FL_EXPORT void fairlead_use_large_pages(void* data, int64_t bytes) {
  const uintptr_t page = 2 << 20, from = (uintptr_t(data) + page - 1) / page * page;
  const uintptr_t to = (uintptr_t(data) + uintptr_t(bytes)) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
}

// Gives the whole pages in `bytes` of memory back to the system. They are zeros afterwards, or again
// what a file has that they are privately mapped from.
FL_EXPORT void fairlead_give_back(void* data, int64_t bytes) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t from = (uintptr_t(data) + page - 1) / page * page;
  const uintptr_t to = (uintptr_t(data) + uintptr_t(bytes)) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

namespace {

void put(float value, float* out) { *out = value; }
void put(float value, bfloat16* out) { from_float(value, out); }
void put(int8_t value, int8_t* out) { *out = value; }

template <class T, class Source>
void pack(T* packed, const Source* source, int64_t rows, int64_t columns, int64_t stride,
          int64_t first, int threads) {
  const int vectors = int((rows + W - 1) / W);
  run(threads, [&](Team& team) {
    team.share(vectors, 16, [&](int begin, int end) {
      for (int64_t row = int64_t(begin) * W; row < int64_t(end) * W && row < rows; row++) {
        const int64_t at = first + row;
        T* out = packed + at / P * columns * P + at % P;
        const Source* in = source + row * stride;
        for (int64_t k = 0; k < columns; k++) put(in[k], out + k * P);
      }
    });
  });
}

}  // namespace

// Bytes of the digits of one row of x.
FL_EXPORT int64_t fairlead_digits_bytes(int64_t columns) { return digits_bytes(columns); }

// Puts source [rows, columns], with `stride` elements between its rows, at rows `first` … of the
// packed weight. The panels' unused rows are not written.
FL_EXPORT void fairlead_pack(float* packed, const float* source, int64_t rows, int64_t columns,
                              int64_t stride, int64_t first, int threads) {
  pack(packed, source, rows, columns, stride, first, threads);
}

// The same into bfloat16, to which floats are rounded.
FL_EXPORT void fairlead_pack_bfloat16(bfloat16* packed, const float* source, int64_t rows,
                                       int64_t columns, int64_t stride, int64_t first,
                                       int threads) {
  pack(packed, source, rows, columns, stride, first, threads);
}

// The same of 8-bit integers.
FL_EXPORT void fairlead_pack_int8(int8_t* packed, const int8_t* source, int64_t rows,
                                   int64_t columns, int64_t stride, int64_t first, int threads) {
  pack(packed, source, rows, columns, stride, first, threads);
}

// The same of 8-bit integers into panels of [ceil(columns / 4)][P][4] for VNNI.
FL_EXPORT void fairlead_pack_int8_fours(uint8_t* packed, const int8_t* source, int64_t rows,
                                         int64_t columns, int64_t stride, int64_t first,
                                         int threads) {
  const int64_t fours = (columns + 3) / 4;
  run(threads, [&](Team& team) {
    team.share(int(rows), 16, [&](int begin, int end) {
      for (int64_t row = begin; row < end; row++) {
        const int64_t at = first + row;
        uint8_t* out = packed + (at / P * fours * P + at % P) * 4;
        for (int64_t k = 0; k < 4 * fours; k++) {
          out[k / 4 * P * 4 + k % 4] = k < columns ? uint8_t(source[row * stride + k] + 128) : 0;
        }
      }
    });
  });
}

// y [count, rows] = x [count, columns] · weightᵀ + bias. `digits`: memory for those of x, which
// INT8_FOURS needs.
FL_EXPORT void fairlead_linear(const float* x, int64_t count, char* digits, const Weight* packed,
                                float* y, int threads) {
  const Weight& weight = *packed;
  run(threads, [&](Team& team) {
    share_product(team, weight, Input{x, digits}, int(count),
                  [&](int panel, int row, int n, const float* tile) {
                    store_tile(weight, panel, row, n, tile, y, false);
                  });
  });
}
