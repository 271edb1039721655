// Products of digits and 8-bit integers in tiles, by AMX: the sums of vnni.h for 16 rows at once.
//
// A tile is 16 rows of 64 bytes. Of activations it holds a line of digits of 16 rows; of weights 16
// steps of half a panel, as they are packed for VNNI. tdpbsud adds the products of signed and
// unsigned bytes to 16 · 16 sums, modulo 2^32 as vpdpbusd does: the results are the same bits, so
// it does not matter which rows of a product are multiplied in tiles.
//
// With FAIRLEAD_AMX_EMULATED the instructions are plain C++, for tests on other processors.
#pragma once

#include "vnni.h"

namespace fairlead {

constexpr int TILE = 16;  // rows

}  // namespace fairlead

#if defined(__AVX512F__)

namespace fairlead {

static_assert(P == 2 * TILE && DIGITS == 4 * TILE);

// Tiles 0 to 3 are sums: of high and low digits, each of both halves of a panel.
#if defined(FAIRLEAD_AMX_EMULATED)

#define FL_AMX

struct Tiles {
  uint8_t bytes[8][TILE][DIGITS];
};
inline thread_local Tiles tiles;

inline void configure_tiles() { memset(&tiles, 0x55, sizeof tiles); }
inline void release_tiles() { memset(&tiles, 0x55, sizeof tiles); }
inline void zero_tile(int tile) { memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]); }
inline void load_tile(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < TILE; row++) {
    memcpy(tiles.bytes[tile][row], static_cast<const char*>(from) + row * stride, DIGITS);
  }
}
inline void store_tile(int tile, void* to, int64_t stride) {
  for (int row = 0; row < TILE; row++) {
    memcpy(static_cast<char*>(to) + row * stride, tiles.bytes[tile][row], DIGITS);
  }
}
inline void add_tile_products(int sums, int digits, int weights) {
  for (int row = 0; row < TILE; row++) {
    for (int column = 0; column < TILE; column++) {
      uint8_t* const at = tiles.bytes[sums][row] + 4 * column;
      uint32_t sum;
      memcpy(&sum, at, sizeof sum);
      for (int k = 0; k < DIGITS; k++) {
        const int digit = int8_t(tiles.bytes[digits][row][k]);
        sum += uint32_t(digit * int(tiles.bytes[weights][k / 4][4 * column + k % 4]));
      }
      memcpy(at, &sum, sizeof sum);
    }
  }
}
#define FL_ZERO_TILE(tile) zero_tile(tile)
#define FL_LOAD_TILE(tile, from, stride) load_tile(tile, from, stride)
#define FL_STORE_TILE(tile, to, stride) store_tile(tile, to, stride)
#define FL_ADD_TILE_PRODUCTS(sums, digits, weights) add_tile_products(sums, digits, weights)

#else

#define FL_AMX __attribute__((target("amx-tile,amx-int8")))

// Palette 1, and of each of its eight tiles the bytes of a row and the rows.
struct alignas(64) TileConfig {
  uint8_t palette, first_row, unused[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
inline constexpr TileConfig TILE_CONFIG{1,
                                        0,
                                        {},
                                        {64, 64, 64, 64, 64, 64, 64, 64},
                                        {16, 16, 16, 16, 16, 16, 16, 16}};

FL_AMX inline void configure_tiles() { _tile_loadconfig(&TILE_CONFIG); }
FL_AMX inline void release_tiles() { _tile_release(); }
#define FL_ZERO_TILE(tile) _tile_zero(tile)
#define FL_LOAD_TILE(tile, from, stride) _tile_loadd(tile, from, stride)
#define FL_STORE_TILE(tile, to, stride) _tile_stored(tile, to, stride)
#define FL_ADD_TILE_PRODUCTS(sums, digits, weights) _tile_dpbsud(sums, digits, weights)

#endif

// Adds the products of a line of digits of 16 rows and 16 steps of a panel.
FL_AMX FL_INLINE void add_line(const char* line, int64_t stride, const uint8_t* panel) {
  FL_LOAD_TILE(4, line, stride);
  FL_LOAD_TILE(5, line + DIGITS, stride);
  FL_LOAD_TILE(6, panel, 4 * P);
  FL_LOAD_TILE(7, panel + 4 * W, 4 * P);
  FL_ADD_TILE_PRODUCTS(0, 4, 6);
  FL_ADD_TILE_PRODUCTS(1, 4, 7);
  FL_ADD_TILE_PRODUCTS(2, 5, 6);
  FL_ADD_TILE_PRODUCTS(3, 5, 7);
}

// `digits_product` of `blocks` times 16 rows.
FL_AMX inline void tiles_product(int blocks, const char* x, int64_t stride, const uint8_t* panel,
                                 int steps, float* y) {
  using Sums = uint32_t __attribute__((vector_size(4 * W)));
  alignas(64) uint8_t rest[TILE * 4 * P] = {};
  alignas(64) uint32_t sums[4][TILE][W];
  const int lines = steps / TILE, left = steps % TILE;
  memcpy(rest, panel + int64_t(lines) * TILE * 4 * P, size_t(left) * 4 * P);
  configure_tiles();
  for (int block = 0; block < blocks; block++, x += TILE * stride, y += TILE * P) {
    // GCC does not know that loading a tile reads memory.
    asm volatile("" ::: "memory");
    FL_ZERO_TILE(0);
    FL_ZERO_TILE(1);
    FL_ZERO_TILE(2);
    FL_ZERO_TILE(3);
    const char* line = x + sizeof(DigitsHead);
    for (int i = 0; i < lines; i++, line += 2 * DIGITS) {
      add_line(line, stride, panel + int64_t(i) * TILE * 4 * P);
    }
    if (left != 0) add_line(line, stride, rest);
    FL_STORE_TILE(0, sums[0], DIGITS);
    FL_STORE_TILE(1, sums[1], DIGITS);
    FL_STORE_TILE(2, sums[2], DIGITS);
    FL_STORE_TILE(3, sums[3], DIGITS);
    asm volatile("" ::: "memory");
    for (int row = 0; row < TILE; row++) {
      const char* const digits = x + row * stride;
      DigitsHead head;
      memcpy(&head, digits, sizeof head);
      Sums of[4];
      for (int i = 0; i < 4; i++) {
        memcpy(&of[i], sums[i][row], sizeof of[i]);
        of[i] += uint32_t(i < 2 ? head.high : head.low);
      }
      for (int half = 0; half < 2; half++) {
        store_sums(digits, reinterpret_cast<Ints>(of[half]), reinterpret_cast<Ints>(of[2 + half]),
                   y + row * P + half * W);
      }
    }
  }
  release_tiles();
}

}  // namespace fairlead

#endif
