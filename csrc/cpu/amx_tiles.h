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
constexpr std::ptrdiff_t kStepsToStore = 3;  // that a block's sums take to reach memory
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

// What goes on beside the tiles of a block: the sums of the one before are written to y, kRowsAtOnce at a step, and the
// lines that this one will be written to are fetched. The loops have as many rounds each time, so that no branch is
// mispredicted while tiles are multiplied: that would cost more than the writing.
template <typename Sink>
class Rows {
 public:
  static constexpr std::ptrdiff_t kRowsAtOnce = 4;
  static constexpr std::ptrdiff_t kStepsToWrite = kBlockRows / kRowsAtOnce;

  explicit Rows(const Sink& sink) : sink_(sink) {}

  // The block whose sums will be at `sums` once its tiles are stored.
  void begin(const char* sums, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t first_column) {
    next_ = {sums, first_row, num_rows, first_column};
  }
  // Its tiles are stored. What was not yet written of the block before is lost.
  void end() {
    block_ = next_;
    next_ = Place{};
  }

  bool writes_whole_block() const { return block_.num_rows == kBlockRows; }
  bool fetches_whole_block() const { return next_.num_rows == kBlockRows; }

  // Rows [4 group, 4 group + 4) of a whole block.
  ANTIPHON_AMX ANTIPHON_INLINE void write(std::ptrdiff_t group) const {
    sink_.template write<kRowsAtOnce>(block_.first_row + group * kRowsAtOnce, block_.first_column, sums_of(group));
  }
  ANTIPHON_AMX ANTIPHON_INLINE void fetch(std::ptrdiff_t group) const {
    sink_.template fetch<kRowsAtOnce>(next_.first_row + group * kRowsAtOnce, next_.first_column);
  }

  // All groups from `group` on, where the block is not whole too; then there is nothing left to write.
  ANTIPHON_AMX __attribute__((noinline)) void write_from(std::ptrdiff_t group) {
    std::ptrdiff_t row = group * kRowsAtOnce;
    for (; row + kRowsAtOnce <= block_.num_rows; row += kRowsAtOnce) write(row / kRowsAtOnce);
    for (; row < block_.num_rows; ++row) {
      sink_.template write<1>(block_.first_row + row, block_.first_column,
                              sums_of(row / kRowsAtOnce) + row % kRowsAtOnce * kLineBytes);
    }
    block_ = Place{};
  }

 private:
  struct Place {
    const char* sums = nullptr;
    std::ptrdiff_t first_row = 0;
    std::ptrdiff_t num_rows = 0;
    std::ptrdiff_t first_column = 0;
  };

  ANTIPHON_INLINE const char* sums_of(std::ptrdiff_t group) const {
    constexpr std::ptrdiff_t kGroupsPerTile = kTileLines / kRowsAtOnce;
    return block_.sums + group / kGroupsPerTile * 2 * kTileBytes +
           group % kGroupsPerTile * kRowsAtOnce * kLineBytes;
  }

  const Sink& sink_;
  Place block_;
  Place next_;
};

// Bytes that will be wanted soon, fetched to the second-level cache some lines at a time.
struct Prefetch {
  const char* next = nullptr;
  std::ptrdiff_t lines_per_step = 0;

  // A line past the end does no harm: nothing waits for it.
  ANTIPHON_INLINE void step() {
    for (std::ptrdiff_t line = 0; line < lines_per_step; ++line, next += kLineBytes) __builtin_prefetch(next, 0, 2);
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

// One step's tiles of x and weight, and their products: Tiles::multiply adds them.
template <typename Tiles, int kRowTiles>
ANTIPHON_AMX ANTIPHON_INLINE void run_step(const Block& block, std::ptrdiff_t step) {
  const char* x = block.x + kRowTiles * block.x_tile_bytes * step;
  const char* weight = block.weight + kPanelStepBytes * step;
  _tile_loadd(6, weight, kLineBytes);
  _tile_stream_loadd(4, x, kLineBytes);  // x is read once per panel: as a stream, it does not push the panel out
  _tile_loadd(7, weight + kTileBytes, kLineBytes);
  if constexpr (kRowTiles == 2) _tile_stream_loadd(5, x + block.x_tile_bytes, kLineBytes);
  Tiles::template multiply<kRowTiles>();
}

template <int kRowTiles>
ANTIPHON_AMX ANTIPHON_INLINE void load_sums(const char* sums) {
  if (sums == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    return;
  }
  _tile_loadd(0, sums, kLineBytes);
  _tile_loadd(1, sums + kTileBytes, kLineBytes);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(2, sums + 2 * kTileBytes, kLineBytes);
    _tile_loadd(3, sums + 3 * kTileBytes, kLineBytes);
  }
}

template <int kRowTiles>
ANTIPHON_AMX ANTIPHON_INLINE void store_sums(char* sums) {
  _tile_stored(0, sums, kLineBytes);
  _tile_stored(1, sums + kTileBytes, kLineBytes);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, sums + 2 * kTileBytes, kLineBytes);
    _tile_stored(3, sums + 3 * kTileBytes, kLineBytes);
  }
}

// Steps [begin, end); beside each of them a group of rows is written, or fetched, or neither.
template <typename Tiles, int kRowTiles, bool kWrites, bool kFetches, typename Sink>
ANTIPHON_AMX ANTIPHON_INLINE void run_steps(const Block& block, std::ptrdiff_t begin, std::ptrdiff_t end,
                                            const Rows<Sink>& rows, Prefetch& prefetch) {
  for (std::ptrdiff_t step = begin; step < end; ++step) {
    run_step<Tiles, kRowTiles>(block, step);
    if constexpr (kWrites) rows.write(step - begin);
    if constexpr (kFetches) rows.fetch(step - begin);
    prefetch.step();
  }
}

// kRowTiles x 2 tiles of sums over some steps, in ascending order.
template <typename Tiles, typename Sink, int kRowTiles>
ANTIPHON_AMX void run_block(const Block& block, Rows<Sink>& rows, Prefetch& prefetch) {
  load_sums<kRowTiles>(block.sums_before);
  // The first steps go without: the sums of the block before are still on their way to memory.
  const std::ptrdiff_t begin =
      std::clamp<std::ptrdiff_t>(block.num_steps - Rows<Sink>::kStepsToWrite, 0, kStepsToStore);
  const std::ptrdiff_t end = std::min(block.num_steps, begin + Rows<Sink>::kStepsToWrite);
  const bool writes = rows.writes_whole_block();
  const bool fetches = rows.fetches_whole_block();
  run_steps<Tiles, kRowTiles, false, false>(block, 0, begin, rows, prefetch);
  if (writes && fetches) {
    run_steps<Tiles, kRowTiles, true, true>(block, begin, end, rows, prefetch);
  } else if (writes) {
    run_steps<Tiles, kRowTiles, true, false>(block, begin, end, rows, prefetch);
  } else if (fetches) {
    run_steps<Tiles, kRowTiles, false, true>(block, begin, end, rows, prefetch);
  } else {
    run_steps<Tiles, kRowTiles, false, false>(block, begin, end, rows, prefetch);
  }
  run_steps<Tiles, kRowTiles, false, false>(block, end, block.num_steps, rows, prefetch);
  rows.write_from(writes ? end - begin : 0);
  store_sums<kRowTiles>(block.sums);
}

}  // namespace antiphon::cpu::amx
