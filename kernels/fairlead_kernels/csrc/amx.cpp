// Whether tiles can be used, and whether they compute what VNNI does.
#include "amx.h"

#include "export.h"

using namespace fairlead;

// Whether a product in tiles is that of VNNI, bit for bit, on this processor, which must have both.
FL_EXPORT int fairlead_tiles_agree() {
#if defined(__AVX512F__)
  constexpr int ROWS = 32, COLUMNS = 150, STEPS = (COLUMNS + 3) / 4;
  alignas(64) char digits[ROWS * digits_bytes(COLUMNS)];
  alignas(64) uint8_t panel[STEPS * 4 * P];
  alignas(64) float in_tiles[ROWS * P], want[ROWS * P];
  uint32_t state = 1;
  const auto random = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
  for (uint8_t& byte : panel) byte = uint8_t(random());
  for (int row = 0; row < ROWS; row++) {
    float x[COLUMNS];
    for (float& value : x) value = float(int32_t(random()) - (1 << 23));
    split_row(x, COLUMNS, digits + row * digits_bytes(COLUMNS));
  }
  tiles_product(ROWS / TILE, digits, digits_bytes(COLUMNS), panel, STEPS, in_tiles);
  digits_product(ROWS, digits, digits_bytes(COLUMNS), panel, STEPS, want, true);
  return memcmp(in_tiles, want, sizeof want) == 0;
#else
  return 0;
#endif
}
