// A product on AMX tiles: one block of 32 rows x 32 columns, and the layouts it reads. Used by amx_product.h.
//
// A tile is 16 lines of 64 bytes. With lines of 32 bfloat16 or 64 int8, one step multiplies a tile of x by a tile of
// the weight: 32 or 64 of k.
//   x        row blocks of up to two tiles of rows: [row block][step][tile][line = row][64 bytes of that row's k]
//   weight   panels of 32 columns: [panel][step][2 halves of 16 columns][16 lines][16 columns][4 bytes of k]
// Both are padded with zeros to whole steps, the weight to whole panels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/avx512.h"
#include "cpu/rounding.h"

namespace antiphon::cpu::amx {

constexpr std::ptrdiff_t kTileLines = 16;
constexpr std::ptrdiff_t kLineBytes = 64;
constexpr std::ptrdiff_t kTileBytes = kTileLines * kLineBytes;
constexpr std::ptrdiff_t kPanelColumns = 32;
constexpr std::ptrdiff_t kPanelStepBytes = 2 * kTileBytes;
constexpr std::ptrdiff_t kBlockRows = 2 * kTileLines;
constexpr std::ptrdiff_t kSumsBytes = 4 * kTileBytes;  // of one block: [tile of rows][half of the panel]


// Tile registers: 0-3 are sums [tile of rows][half], 4-5 are x, 6-7 the weight.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t lines[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "the processor reads 64 bytes");

// For tiles of `rows` rows of x, 1..16. The configuration belongs to the thread, until _tile_release().
ANTIPHON_AMX inline void load_config(std::ptrdiff_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.lines[tile] = static_cast<std::uint8_t>(tile < 6 ? rows : kTileLines);
  }
  // g++ 12 takes the instruction to read 8 bytes, and drops the other stores. Tile loads it takes to read none, so this
  // also makes what was written before visible to them.
  asm volatile("" ::"m"(config) : "memory");
  _tile_loadconfig(&config);
}

// Sums of a finished block, written to y while the next block's tiles are multiplied.
template <typename Product>
class PendingRows {
 public:
  explicit PendingRows(const Product& product) : product_(product) {}

  void set(const char* sums, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t first_column) {
    sums_ = sums;
    first_row_ = first_row;
    first_column_ = first_column;
    next_ = 0;
    num_rows_ = num_rows;
  }

  ANTIPHON_AMX ANTIPHON_INLINE void write(std::ptrdiff_t num_rows) {
    for (const std::ptrdiff_t end = std::min(num_rows_, next_ + num_rows); next_ < end; ++next_) {
      const char* line = sums_ + next_ / kTileLines * 2 * kTileBytes + next_ % kTileLines * kLineBytes;
      product_.write_row(first_row_ + next_, first_column_, line, line + kTileBytes);
    }
  }

  ANTIPHON_AMX void write_rest() { write(kBlockRows); }

 private:
  const Product& product_;
  const char* sums_ = nullptr;
  std::ptrdiff_t first_row_ = 0;
  std::ptrdiff_t first_column_ = 0;
  std::ptrdiff_t next_ = 0;
  std::ptrdiff_t num_rows_ = 0;
};

// Bytes that will be wanted soon, fetched to the second-level cache some lines at a time.
struct Prefetch {
  const char* next = nullptr;
  const char* end = nullptr;
  std::ptrdiff_t lines_per_step = 0;

  ANTIPHON_INLINE void step() {
    for (const char* stop = std::min(end, next + lines_per_step * kLineBytes); next < stop; next += kLineBytes) {
      __builtin_prefetch(next, 0, 2);
    }
  }
};

struct Block {
  const char* x;                // this row block, from the first of these steps on
  std::ptrdiff_t x_tile_bytes;  // of one tile of x: it has fewer than 16 lines when its chunk has fewer rows
  const char* weight;
  std::ptrdiff_t num_steps;
  const char* sums_before;  // null: start from zero
  char* sums;
};

// kRowTiles x 2 tiles of sums over some steps, in ascending order. Product::multiply adds one step's products.
template <typename Product, int kRowTiles>
ANTIPHON_AMX void run_block(const Block& block, PendingRows<Product>& pending, Prefetch& prefetch) {
  if (block.sums_before == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, block.sums_before, kLineBytes);
    _tile_loadd(1, block.sums_before + kTileBytes, kLineBytes);
    if constexpr (kRowTiles == 2) {
      _tile_loadd(2, block.sums_before + 2 * kTileBytes, kLineBytes);
      _tile_loadd(3, block.sums_before + 3 * kTileBytes, kLineBytes);
    }
  }
  const std::ptrdiff_t rows_per_step = ceil_div(kBlockRows, block.num_steps);  // all of them, by the last step
  const char* x = block.x;
  const char* weight = block.weight;
  for (std::ptrdiff_t step = 0; step < block.num_steps; ++step) {
    _tile_loadd(6, weight, kLineBytes);
    _tile_stream_loadd(4, x, kLineBytes);  // x is read once per panel: as a stream, it does not push the panel out
    _tile_loadd(7, weight + kTileBytes, kLineBytes);
    if constexpr (kRowTiles == 2) _tile_stream_loadd(5, x + block.x_tile_bytes, kLineBytes);
    Product::template multiply<kRowTiles>();
    weight += kPanelStepBytes;
    x += kRowTiles * block.x_tile_bytes;
    pending.write(rows_per_step);
    prefetch.step();
  }
  _tile_stored(0, block.sums, kLineBytes);
  _tile_stored(1, block.sums + kTileBytes, kLineBytes);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, block.sums + 2 * kTileBytes, kLineBytes);
    _tile_stored(3, block.sums + 3 * kTileBytes, kLineBytes);
  }
}

}  // namespace antiphon::cpu::amx
