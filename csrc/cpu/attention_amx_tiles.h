// What the tile unit does for attention, in pieces small enough to stand between a softmax's. See attention_bf16.h.
#pragma once

#include "cpu/attention_bf16.h"
#include "cpu/avx512.h"
#include "cpu/rounding.h"

namespace antiphon::cpu::amx {

using bf16::kTileRows;
using bf16::PackedBlock;
using bf16::Unit;

// Tile registers: 0-3 sums, 4 of A and 6 of B; 5 is one line of ones, 7 one line of sums.
ANTIPHON_AMX inline void load_attention_config(const char* ones) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.lines[tile] = tile == 5 || tile == 7 ? 1 : kTileLines;
  asm volatile("" ::"m"(config) : "memory");  // see load_config
  _tile_loadconfig(&config);
  _tile_loadd(5, ones, kLineBytes);
}

// What is written by vectors and read by tiles, or the other way, the compiler does not know of.
ANTIPHON_INLINE void order_memory() { asm volatile("" ::: "memory"); }

template <int kTile>
ANTIPHON_AMX ANTIPHON_INLINE void store_sums(void* to) {
  if constexpr (kTile == 0) _tile_stored(0, to, kLineBytes);
  if constexpr (kTile == 1) _tile_stored(1, to, kLineBytes);
  if constexpr (kTile == 2) _tile_stored(2, to, kLineBytes);
  if constexpr (kTile == 3) _tile_stored(3, to, kLineBytes);
}

template <int kTile>
ANTIPHON_AMX ANTIPHON_INLINE void load_sums(const void* from) {
  if constexpr (kTile == 0) _tile_loadd(0, from, kLineBytes);
  if constexpr (kTile == 1) _tile_loadd(1, from, kLineBytes);
  if constexpr (kTile == 2) _tile_loadd(2, from, kLineBytes);
  if constexpr (kTile == 3) _tile_loadd(3, from, kLineBytes);
}

template <int kTile>
ANTIPHON_AMX ANTIPHON_INLINE void zero_sums() {
  if constexpr (kTile == 0) _tile_zero(0);
  if constexpr (kTile == 1) _tile_zero(1);
  if constexpr (kTile == 2) _tile_zero(2);
  if constexpr (kTile == 3) _tile_zero(3);
}

// sums[kTile] += a * B
template <int kTile>
ANTIPHON_AMX ANTIPHON_INLINE void multiply(const void* a, std::ptrdiff_t line_bytes) {
  _tile_loadd(4, a, line_bytes);
  if constexpr (kTile == 0) _tile_dpbf16ps(0, 4, 6);
  if constexpr (kTile == 1) _tile_dpbf16ps(1, 4, 6);
  if constexpr (kTile == 2) _tile_dpbf16ps(2, 4, 6);
  if constexpr (kTile == 3) _tile_dpbf16ps(3, 4, 6);
}

// The tile unit's work beside one unit's softmax, in steps of at most four products, one for each tile of sums: first
// 32 dims of scores each, then 32 keys of 64 dims of values each. Sums are stored as late as can be, just before their
// tile takes on others, so that no store waits for them.
template <bool kInt8>
struct TileWork {
  const Unit* next;  // whose scores are wanted; null: nobody's
  float* scores;
  const Unit* last;  // whose weights are ready; null: nobody's
  const char* weights;
  const Unit* before_last;  // whose last sums are still in the tiles; null: nobody's
  std::ptrdiff_t steps;     // head_dim / 32

  std::ptrdiff_t num_steps() const { return steps + 2 * ceil_div(steps, 2); }

  // One of four parts of `count` steps. To cut all of them up gains nothing.
  ANTIPHON_AMX ANTIPHON_INLINE void run_part(std::ptrdiff_t first, std::ptrdiff_t count, int part) const {
    if (count == 0) return;
    const std::ptrdiff_t last_step = first + count - 1;
    if (part == 0) run_steps(first, last_step);
    if (part == 0) product<0>(last_step);
    if (part == 1) product<1>(last_step);
    if (part == 2) product<2>(last_step);
    if (part == 3) product<3>(last_step);
  }

  // After the last step: `change` may work on what was summed so far, for there is none of it in the tiles.
  template <typename Change>
  ANTIPHON_AMX ANTIPHON_INLINE void with_sums_in_memory(const Change& change) const {
    if (last != nullptr) move_sums(true);
    order_memory();
    change();
    order_memory();
    if (last != nullptr) move_sums(false);
  }

  ANTIPHON_AMX void run_all() const {
    order_memory();
    run_steps(0, num_steps());
    order_memory();
  }

 private:
  template <int kTile>
  ANTIPHON_AMX ANTIPHON_INLINE void product(std::ptrdiff_t step) const {
    if (step < steps) {
      score_product<kTile>(step);
    } else {
      value_product<kTile>((step - steps) / 2, (step - steps) % 2);
    }
  }

  ANTIPHON_AMX ANTIPHON_INLINE void run_steps(std::ptrdiff_t first, std::ptrdiff_t end) const {
    for (std::ptrdiff_t step = first; step < end; ++step) {
      product<0>(step);
      product<1>(step);
      product<2>(step);
      product<3>(step);
    }
  }

  template <int kTile>
  ANTIPHON_AMX ANTIPHON_INLINE void score_product(std::ptrdiff_t step) const {
    if (step == 0) {
      if (before_last != nullptr) store_values<kTile>(*before_last, (steps - 1) / 2);
      zero_sums<kTile>();
    }
    if (next == nullptr) return;
    const PackedBlock& block = *next->block;
    if constexpr (kTile == 0) _tile_loadd(6, next->tile.queries + step * kTileBytes, kLineBytes);
    multiply<kTile>(block.keys + kTile * 16 * block.key_bytes + step * kLineBytes, block.key_bytes);
  }

  // The last values' sums: to memory, or back.
  ANTIPHON_AMX ANTIPHON_INLINE void move_sums(bool to_memory) const {
    const std::ptrdiff_t group = (steps - 1) / 2;
    if (to_memory) {
      store_values<0>(*last, group);
      store_values<1>(*last, group);
      store_values<2>(*last, group);
      store_values<3>(*last, group);
      return;
    }
    load_sums<0>(values_of<0>(*last, group));
    load_sums<1>(values_of<1>(*last, group));
    if (has<2>(group)) load_sums<2>(values_of<2>(*last, group));
    if (has<3>(group)) load_sums<3>(values_of<3>(*last, group));
    if (!kInt8) _tile_loadd(7, last->tile.sum, kLineBytes);
  }

  // 64 dims are a group; the last may have 32.
  template <int kTile>
  ANTIPHON_AMX ANTIPHON_INLINE void value_product(std::ptrdiff_t group, std::ptrdiff_t key_step) const {
    if (key_step == 0 && group == 0 && next != nullptr) store_sums<kTile>(scores + kTile * 16 * kTileRows);
    if (last == nullptr) return;
    if (key_step == 0 && group > 0) store_values<kTile>(*last, group - 1);
    if (!has<kTile>(group)) return;
    if (key_step == 0) {
      load_sums<kTile>(values_of<kTile>(*last, group));
      if (!kInt8 && kTile == 0 && group == 0) _tile_loadd(7, last->tile.sum, kLineBytes);
    }
    if constexpr (kTile == 0) {
      _tile_loadd(6, weights + key_step * kTileBytes, kLineBytes);
      if (!kInt8 && group == 0) _tile_dpbf16ps(7, 5, 6);
    }
    multiply<kTile>(last->block->values + (key_step * 2 * steps + 4 * group + kTile) * kTileBytes, kLineBytes);
  }

  template <int kTile>
  ANTIPHON_AMX ANTIPHON_INLINE void store_values(const Unit& unit, std::ptrdiff_t group) const {
    if (has<kTile>(group)) store_sums<kTile>(values_of<kTile>(unit, group));
    if (!kInt8 && kTile == 0 && group == 0) _tile_stored(7, unit.tile.sum, kLineBytes);
  }

  template <int kTile>
  bool has(std::ptrdiff_t group) const {
    return kTile < 2 || 2 * group + 2 <= steps;
  }

  template <int kTile>
  static float* values_of(const Unit& unit, std::ptrdiff_t group) {
    return unit.tile.accumulator + (4 * group + kTile) * 16 * kTileRows;
  }
};

}  // namespace antiphon::cpu::amx
