// Attention on AMX tiles: see attention_amx.h for the numbers. The tile unit and the vector unit work at the same time,
// on different row tiles: while one tile's scores become weights, the scores of the next are multiplied, and the weights
// of the one before.
#if defined(__x86_64__)
#include "cpu/attention_amx.h"

#include <cmath>

#include "cpu/attention.h"
#include "cpu/attention_amx_pack.h"
#include "cpu/attention_amx_softmax.h"
#include "cpu/attention_item.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace amx {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// Tile registers: 0-3 sums, 4 of A and 6 of B; 5 is one line of ones, 7 one line of sums.
ANTIPHON_AMX void load_attention_config(const char* ones) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.lines[tile] = tile == 5 || tile == 7 ? 1 : kTileLines;
  asm volatile("" ::"m"(config) : "memory");  // see load_config
  _tile_loadconfig(&config);
  _tile_loadd(5, ones, kLineBytes);
}

// What is written by vectors and read by tiles, or the other way, the compiler does not know of.
ANTIPHON_INLINE void order_memory() { asm volatile("" ::: "memory"); }

// Scores of 64 keys and one row tile, over 32 dims.
ANTIPHON_AMX ANTIPHON_INLINE void score_step(const PackedBlock& block, const RowTile& tile, float* scores,
                                             std::ptrdiff_t step) {
  if (step == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* keys = block.keys + step * kLineBytes;
  _tile_loadd(6, tile.queries + step * kTileBytes, kLineBytes);
  _tile_loadd(4, keys, block.key_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(4, keys + 16 * block.key_bytes, block.key_bytes);
  _tile_dpbf16ps(1, 4, 6);
  _tile_loadd(4, keys + 32 * block.key_bytes, block.key_bytes);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(4, keys + 48 * block.key_bytes, block.key_bytes);
  _tile_dpbf16ps(3, 4, 6);
  if (step + 1 == block.steps) {
    _tile_stored(0, scores, kLineBytes);
    _tile_stored(1, scores + 16 * kTileRows, kLineBytes);
    _tile_stored(2, scores + 32 * kTileRows, kLineBytes);
    _tile_stored(3, scores + 48 * kTileRows, kLineBytes);
  }
}

// Adds 32 keys' values to kTiles tiles of 16 dims; in the first of them, with bfloat16, to the sum as well.
template <int kTiles, bool kInt8>
ANTIPHON_AMX ANTIPHON_INLINE void value_tiles(const PackedBlock& block, const RowTile& tile, const char* weights,
                                              std::ptrdiff_t first_tile, std::ptrdiff_t key_step) {
  char* sums = reinterpret_cast<char*>(tile.accumulator) + first_tile * kTileBytes;
  const bool with_sum = !kInt8 && first_tile == 0;
  if (key_step == 0) {
    _tile_loadd(0, sums, kLineBytes);
    _tile_loadd(1, sums + kTileBytes, kLineBytes);
    if constexpr (kTiles == 4) {
      _tile_loadd(2, sums + 2 * kTileBytes, kLineBytes);
      _tile_loadd(3, sums + 3 * kTileBytes, kLineBytes);
    }
    if (with_sum) _tile_loadd(7, tile.sum, kLineBytes);
  }
  const char* values = block.values + (key_step * 2 * block.steps + first_tile) * kTileBytes;
  _tile_loadd(6, weights + key_step * kTileBytes, kLineBytes);
  _tile_loadd(4, values, kLineBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(4, values + kTileBytes, kLineBytes);
  _tile_dpbf16ps(1, 4, 6);
  if constexpr (kTiles == 4) {
    _tile_loadd(4, values + 2 * kTileBytes, kLineBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(4, values + 3 * kTileBytes, kLineBytes);
    _tile_dpbf16ps(3, 4, 6);
  }
  if (with_sum) _tile_dpbf16ps(7, 5, 6);
  if (key_step == 1) {
    _tile_stored(0, sums, kLineBytes);
    _tile_stored(1, sums + kTileBytes, kLineBytes);
    if constexpr (kTiles == 4) {
      _tile_stored(2, sums + 2 * kTileBytes, kLineBytes);
      _tile_stored(3, sums + 3 * kTileBytes, kLineBytes);
    }
    if (with_sum) _tile_stored(7, tile.sum, kLineBytes);
  }
}

// The tile unit's work beside one tile's softmax, cut into steps of about equal length.
template <bool kInt8>
struct TileWork {
  const PackedBlock& block;
  const RowTile* next;  // whose scores are wanted; null: nobody's
  float* scores;
  const RowTile* last;  // whose weights are ready
  const char* weights;

  std::ptrdiff_t num_steps() const { return block.steps + 2 * ceil_div(block.steps, 2); }

  ANTIPHON_AMX ANTIPHON_INLINE void run(std::ptrdiff_t first, std::ptrdiff_t end) const {
    for (std::ptrdiff_t step = first; step < end; ++step) {
      if (step < block.steps) {
        if (next != nullptr) score_step(block, *next, scores, step);
      } else if (last != nullptr) {
        const std::ptrdiff_t first_tile = (step - block.steps) / 2 * 4;
        const std::ptrdiff_t key_step = (step - block.steps) % 2;
        if (first_tile + 4 <= 2 * block.steps) {
          value_tiles<4, kInt8>(block, *last, weights, first_tile, key_step);
        } else {
          value_tiles<2, kInt8>(block, *last, weights, first_tile, key_step);
        }
      }
    }
  }

  ANTIPHON_AMX void run_all() const {
    order_memory();
    run(0, num_steps());
    order_memory();
  }
};

// A row that sees a key whose values are not finite becomes NaN.
ANTIPHON_AMX __attribute__((noinline)) void spoil(const PackedBlock& block, const RowTile& tile) {
  const __m512i first_bad = _mm512_set1_epi32(static_cast<int>(block.first_bad_key));
  const __mmask16 lanes = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(tile.seen), first_bad);
  const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
  _mm512_storeu_ps(tile.sum, _mm512_mask_mov_ps(_mm512_loadu_ps(tile.sum), lanes, nan));
}

template <bool kInt8, bool kMasked>
ANTIPHON_AMX ANTIPHON_INLINE Softened soften_once(const PackedBlock& block, const RowTile& tile, const float* scores,
                                                  char* weights, const TileWork<kInt8>* work, NextPage& next_page) {
  Softmax<kInt8, kMasked> softmax(block, tile, scores, weights);
  const std::ptrdiff_t num_steps = work != nullptr ? work->num_steps() : 0;
  for (std::ptrdiff_t quarter = 0; quarter < 4; ++quarter) {
    if (work != nullptr) {
      order_memory();
      work->run(quarter * num_steps / 4, (quarter + 1) * num_steps / 4);
      order_memory();
      next_page.prefetch();
    }
    softmax.sixteen_keys(16 * quarter);
  }
  return softmax.end();
}

// Scores to weights, beside the tile unit's work.
template <bool kInt8, bool kMasked>
ANTIPHON_AMX __attribute__((noinline)) void soften(const PackedBlock& block, const RowTile& tile, const float* scores,
                                                   char* weights, const TileWork<kInt8>& work, NextPage& next_page) {
  if (block.first) {
    const __m512i seen = _mm512_loadu_si512(tile.seen);
    move_reference<kInt8>(block, tile, scores, _mm512_cmpgt_epi32_mask(seen, _mm512_setzero_si512()));
  }
  Softened done = soften_once<kInt8, kMasked>(block, tile, scores, weights, &work, next_page);
  if (done.too_large != 0) {
    move_reference<kInt8>(block, tile, scores, done.too_large);
    done = soften_once<kInt8, kMasked>(block, tile, scores, weights, nullptr, next_page);
  }
  if (kInt8) _mm512_storeu_ps(tile.sum, _mm512_add_ps(done.sum, _mm512_loadu_ps(tile.sum)));
  if (!kInt8 && block.first_bad_key < kPageKeys) spoil(block, tile);
}

// One block for some row tiles.
template <bool kInt8>
ANTIPHON_AMX void run_block(const PackedBlock& block, const RowTile* tiles, std::ptrdiff_t num_tiles,
                            const Scratch& scratch, NextPage& next_page) {
  TileWork<kInt8>{block, tiles, scratch.scores[0], nullptr, nullptr}.run_all();
  for (std::ptrdiff_t i = 0; i < num_tiles; ++i) {
    const int here = i % 2, other = 1 - here;
    const TileWork<kInt8> work{block, i + 1 < num_tiles ? tiles + i + 1 : nullptr, scratch.scores[other],
                               i > 0 ? tiles + i - 1 : nullptr, scratch.weights[other]};
    if (tiles[i].masked) {
      soften<kInt8, true>(block, tiles[i], scratch.scores[here], scratch.weights[here], work, next_page);
    } else {
      soften<kInt8, false>(block, tiles[i], scratch.scores[here], scratch.weights[here], work, next_page);
    }
  }
  const std::ptrdiff_t last = num_tiles - 1;
  TileWork<kInt8>{block, nullptr, nullptr, tiles + last, scratch.weights[last % 2]}.run_all();
}

// Whether the values of 64 lines of bfloat16 are surely finite: no sum of 16 lines is anything else.
ANTIPHON_AMX bool surely_finite(const char* lines, std::ptrdiff_t key_bytes, std::ptrdiff_t steps, float* sums) {
  _tile_zero(7);
  for (std::ptrdiff_t key = 0; key < kPageKeys; key += 16) {
    for (std::ptrdiff_t step = 0; step < steps; ++step) {
      _tile_loadd(6, lines + key * key_bytes + step * kLineBytes, key_bytes);
      _tile_dpbf16ps(7, 5, 6);
    }
  }
  _tile_stored(7, sums, kLineBytes);
  order_memory();
  const __m512 x = _mm512_loadu_ps(sums);
  return _mm512_cmp_ps_mask(_mm512_sub_ps(x, x), _mm512_setzero_ps(), _CMP_EQ_OQ) == 0xffff;
}

// One item under one KV head.
template <bool kInt8>
class AmxWork {
 public:
  AmxWork(const ItemView& item, const KvLayer& layer, const float* q, float* out, Workspace& workspace)
      : item_(item), layer_(layer), q_(q), out_(out), steps_(ceil_div(layer.head_dim, kStepDims)),
        num_tiles_(ceil_div(item.num_rows(), kTileRows)) {
    const std::ptrdiff_t page_bytes = 4 * steps_ * kTileBytes;
    const std::ptrdiff_t num_bytes =
        num_tiles_ * (RowTile::num_bytes(steps_) + round_up(sizeof(RowTile), kLineBytes)) + 3 * page_bytes +
        2 * (kScoreFloats * 4 + kWeightBytes) + 2 * kPageKeys * 4 + 2 * kLineBytes +
        num_tiles_ * kTileRows * static_cast<std::ptrdiff_t>(sizeof(std::int32_t) + sizeof(std::ptrdiff_t));
    next_ = workspace.at_least<char>(num_bytes);
    for (int i = 0; i < 2; ++i) {
      scratch_.scores[i] = take<float>(kScoreFloats);
      scratch_.weights[i] = take<char>(kWeightBytes);
      scales_[i] = take<float>(kPageKeys);
    }
    ones_ = take<char>(kLineBytes);
    check_ = take<float>(kTileRows);
    values_ = take<char>(page_bytes);
    for (char*& lines : lines_) lines = take<char>(page_bytes);
    seen_ = take<std::int32_t>(num_tiles_ * kTileRows);
    elements_ = take<std::ptrdiff_t>(num_tiles_ * kTileRows);
    active_ = take<RowTile>(round_up(num_tiles_ * static_cast<std::ptrdiff_t>(sizeof(RowTile)), kLineBytes) /
                            static_cast<std::ptrdiff_t>(sizeof(RowTile)));
    next_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::ptrdiff_t>(next_), kLineBytes));
    tiles_ = next_;
  }

  ANTIPHON_AMX void run() {
    for (std::ptrdiff_t i = 0; i < kStepKeys; ++i) reinterpret_cast<std::uint16_t*>(ones_)[i] = 0x3f80;
    load_attention_config(ones_);
    load_queries();
    item_.for_each_run([this](const ItemRun& run) { this->run_page(run); });
    _tile_release();
    store();
  }

 private:
  template <typename T>
  T* take(std::ptrdiff_t count) {
    char* taken = next_;
    next_ += count * static_cast<std::ptrdiff_t>(sizeof(T));
    return reinterpret_cast<T*>(taken);
  }

  RowTile tile(std::ptrdiff_t index) const {
    char* at = tiles_ + index * RowTile::num_bytes(steps_);
    RowTile tile{};
    tile.queries = at;
    tile.accumulator = reinterpret_cast<float*>(at + steps_ * kTileBytes);
    tile.sum = reinterpret_cast<float*>(at + 3 * steps_ * kTileBytes);
    tile.reference = tile.sum + kTileRows;
    tile.seen = seen_ + index * kTileRows;
    return tile;
  }

  std::ptrdiff_t rows_of(std::ptrdiff_t index) const {
    return std::min(kTileRows, item_.num_rows() - index * kTileRows);
  }

  ANTIPHON_AMX void load_queries() {
    const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(layer_.head_dim)));
    item_.for_each_row([this](std::ptrdiff_t row, std::ptrdiff_t element) { elements_[row] = element; });
    for (std::ptrdiff_t i = 0; i < num_tiles_; ++i) {
      const RowTile to = tile(i);
      const float* rows[kTileRows];
      for (std::ptrdiff_t row = 0; row < rows_of(i); ++row) rows[row] = q_ + elements_[i * kTileRows + row];
      pack_queries(rows, rows_of(i), layer_.head_dim, scale, to.queries);
      std::memset(to.accumulator, 0, static_cast<std::size_t>(2 * steps_ * kTileBytes + kLineBytes));  // and the sum
      std::fill_n(to.reference, kTileRows, -std::numeric_limits<float>::infinity());
    }
  }

  ANTIPHON_AMX void store() const {
    for (std::ptrdiff_t i = 0; i < num_tiles_; ++i) {
      float* rows[kTileRows];
      for (std::ptrdiff_t row = 0; row < rows_of(i); ++row) rows[row] = out_ + elements_[i * kTileRows + row];
      store_rows(tile(i), rows_of(i), layer_.head_dim, rows);
    }
  }

  // Fills active_ with the tiles that see something of this run's block. Returns how many.
  std::ptrdiff_t find_active(const ItemRun& run, std::ptrdiff_t& num_keys) {
    const std::ptrdiff_t first_tile = run.first_row / kTileRows, end_tile = ceil_div(run.end_row, kTileRows);
    std::fill(seen_ + first_tile * kTileRows, seen_ + end_tile * kTileRows, 0);
    num_keys = item_.count_seen(run, seen_);
    if (run.end_row == item_.num_rows()) {  // lanes without a row do as the last one does
      std::fill(seen_ + run.end_row, seen_ + end_tile * kTileRows, seen_[run.end_row - 1]);
    }
    std::ptrdiff_t num_active = 0;
    for (std::ptrdiff_t i = first_tile; i < end_tile; ++i) {
      const std::int32_t* seen = seen_ + i * kTileRows;
      if (*std::max_element(seen, seen + kTileRows) == 0) continue;
      active_[num_active] = tile(i);
      active_[num_active++].masked = *std::min_element(seen, seen + kTileRows) < kPageKeys;
    }
    return num_active;
  }

  ANTIPHON_AMX void run_page(const ItemRun& run) {
    std::ptrdiff_t num_keys = 0;
    const std::ptrdiff_t num_active = find_active(run, num_keys);
    NextPage next_page;
    const std::ptrdiff_t next = item_.next_page(run);
    if (next >= 0) {
      next_page = NextPage(item_.at(layer_.k, next), item_.at(layer_.v, next), item_.page_bytes(),
                           4 * num_active + kPackPrefetches * steps_);
    }
    run_block<kInt8>(pack(run, num_keys, next_page), active_, num_active, scratch_, next_page);
  }

  ANTIPHON_AMX PackedBlock pack(const ItemRun& run, std::ptrdiff_t num_keys, NextPage& next_page) {
    const std::ptrdiff_t page = item_.page(run), slot = item_.slot(page);
    PackedBlock block{};
    block.steps = steps_;
    block.first = run.block == 0;
    block.first_bad_key = kPageKeys;
    block.key_bytes = steps_ * kLineBytes;
    block.keys = lines_of(item_.at(layer_.k, page), num_keys, lines_[0]);
    const char* values = lines_of(item_.at(layer_.v, page), num_keys, lines_[1]);
    order_memory();
    if (kInt8) {
      pack_scales(layer_.k_scale + slot, num_keys, scales_[0]);
      pack_scales(layer_.v_scale + slot, num_keys, scales_[1]);
      block.k_scale = scales_[0];
      block.v_scale = scales_[1];
    } else if (!surely_finite(values, block.key_bytes, steps_, check_)) {
      if (values != lines_[1]) std::memcpy(lines_[1], values, static_cast<std::size_t>(kPageKeys * block.key_bytes));
      values = lines_[1];
      block.first_bad_key = clear_bad_lines(steps_, lines_[1]);
    }
    pack_values(values, block.key_bytes, steps_, values_, next_page);
    block.values = values_;
    return block;
  }

  // A page's lines as bfloat16: where they are, if they are all there, else in `lines`.
  const char* lines_of(const char* page, std::ptrdiff_t num_keys, char* lines) const {
    if (kInt8) {
      widen_page<std::int8_t>(page, num_keys, layer_.head_dim, lines);
    } else if (num_keys == kPageKeys && layer_.head_dim == steps_ * kStepDims) {
      return page;
    } else {
      widen_page<std::uint16_t>(page, num_keys, layer_.head_dim, lines);
    }
    return lines;
  }

  const ItemView& item_;
  const KvLayer& layer_;
  const float* q_;
  float* out_;
  std::ptrdiff_t steps_;
  std::ptrdiff_t num_tiles_;
  char* next_;
  Scratch scratch_;
  char* ones_;
  float* check_;
  char* values_;
  char* lines_[2];
  float* scales_[2];
  std::int32_t* seen_;
  std::ptrdiff_t* elements_;
  RowTile* active_;
  char* tiles_;
};

// Subnormal results as zeros, and no microcode for them, while an object lives.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};

void run_item(const ItemView& item, const KvLayer& layer, const float* q, float* out, Workspace& workspace) {
  const FlushSubnormals flush;
  if (layer.storage == KvStorage::kInt8) {
    AmxWork<true>(item, layer, q, out, workspace).run();
  } else {
    AmxWork<false>(item, layer, q, out, workspace).run();
  }
}

}  // namespace
}  // namespace amx

const AttentionForm kAmxAttention = {{}, {}, {}, amx::run_item, {448, amx::kTileRows}};

}  // namespace antiphon::cpu
#endif
