// An item's way through its pages, for the forms of attention_bf16.h: queries are packed once, then a chunk of pages at
// a time is packed, and all rows go through it.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/attention.h"
#include "cpu/attention_bf16_pack.h"
#include "cpu/attention_item.h"
#include "cpu/workspace.h"

namespace antiphon::cpu::bf16 {

constexpr double kLog2E = 1.4426950408889634;
constexpr std::ptrdiff_t kChunkBlocks = 8;  // packed at a time
constexpr std::ptrdiff_t kFewBlocks = 4;
constexpr std::ptrdiff_t kGroupTiles = 4;   // of rows, that go through a chunk together: their sums stay in the cache
static_assert(2 * kChunkBlocks <= PagePrefetch::kMostPages, "a chunk's pages of keys and of values");

// One item under one KV head. A form is
//   begin(), end()                                      what a thread needs before the first unit and after the last
//   run_units<kInt8>(units, count, scratch, prefetch)   units of one chunk, one after the other
//   prefetches(steps)                                   how often a unit calls prefetch.step()
template <typename Form, bool kInt8>
class Work {
 public:
  Work(const ItemView& item, const KvLayer& layer, const float* q, float* out, Workspace& workspace)
      : item_(item), layer_(layer), q_(q), out_(out), steps_(ceil_div(layer.head_dim, kStepDims)),
        num_tiles_(ceil_div(item.num_rows(), kTileRows)) {
    take_all(nullptr);
    take_all(workspace.at_least<char>(taken_bytes_));
  }

  ANTIPHON_AVX512_BF16 void run() {
    Form::begin();
    load_queries();
    item_.for_each_run([this](const ItemRun& run) { runs_.push_back(run); });
    // Where all rows are one group a longer chunk gains little, and nothing has fetched the first one's pages.
    const std::ptrdiff_t blocks = num_tiles_ > kGroupTiles ? kChunkBlocks : kFewBlocks;
    for (std::ptrdiff_t first = 0; first < num_runs(); first += blocks) {
      run_chunk(first, std::min(blocks, num_runs() - first));
    }
    Form::end();
    store();
  }

 private:
  // Where everything lies from `start` on; with null, only how much of it there is.
  void take_all(char* start) {
    const std::ptrdiff_t page_bytes = 4 * steps_ * kTileBytes, num_rows = num_tiles_ * kTileRows;
    start_ = start;
    taken_bytes_ = 0;
    for (int i = 0; i < 2; ++i) {
      scratch_.scores[i] = take<float>(kScoreFloats);
      scratch_.weights[i] = take<char>(kWeightBytes);
    }
    lines_ = take<char>(page_bytes);
    for (Place& place : places_) {
      place.keys = take<char>(page_bytes);
      place.values = take<char>(page_bytes);
      place.k_scale = take<float>(kPageKeys);
      place.v_scale = take<float>(kPageKeys);
      place.seen = take<std::int32_t>(num_rows);
    }
    elements_ = take<std::ptrdiff_t>(num_rows);
    tiles_ = take<char>(num_tiles_ * RowTile::num_bytes(steps_));
  }

  template <typename T>
  T* take(std::ptrdiff_t count) {
    char* taken = start_ == nullptr ? nullptr : start_ + taken_bytes_;
    taken_bytes_ += round_up(count * static_cast<std::ptrdiff_t>(sizeof(T)), kLineBytes);
    return reinterpret_cast<T*>(taken);
  }

  RowTile tile(std::ptrdiff_t index) const {
    char* at = tiles_ + index * RowTile::num_bytes(steps_);
    RowTile tile{};
    tile.num_rows = rows_of(index);
    tile.queries = at;
    tile.accumulator = reinterpret_cast<float*>(at + steps_ * kTileBytes);
    tile.sum = reinterpret_cast<float*>(at + 3 * steps_ * kTileBytes);
    tile.reference = tile.sum + kTileRows;
    return tile;
  }

  std::ptrdiff_t rows_of(std::ptrdiff_t index) const {
    return std::min(kTileRows, item_.num_rows() - index * kTileRows);
  }

  // Where the rows of a tile lie in `tensor`, which is q or out.
  template <typename T>
  std::ptrdiff_t find_rows(std::ptrdiff_t index, T* tensor, T** rows) const {
    for (std::ptrdiff_t row = 0; row < rows_of(index); ++row) rows[row] = tensor + elements_[index * kTileRows + row];
    return rows_of(index);
  }

  // The rows of a tile that comes two tiles on: they lie far apart, where nothing else would fetch them.
  template <bool kToWrite>
  void prefetch_rows(std::ptrdiff_t index, const float* tensor) const {
    if (index >= num_tiles_) return;
    const float* rows[kTileRows];
    const std::ptrdiff_t num_rows = find_rows(index, tensor, rows);
    for (std::ptrdiff_t row = 0; row < num_rows; ++row) {
      for (std::ptrdiff_t dim = 0; dim < layer_.head_dim; dim += 16) __builtin_prefetch(rows[row] + dim, kToWrite, 3);
    }
  }

  ANTIPHON_AVX512_BF16 void load_queries() {
    const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(layer_.head_dim)));
    item_.for_each_row([this](std::ptrdiff_t row, std::ptrdiff_t element) { elements_[row] = element; });
    for (std::ptrdiff_t i = 0; i < num_tiles_; ++i) {
      prefetch_rows<false>(i + 2, q_);
      const RowTile to = tile(i);
      const float* rows[kTileRows];
      const std::ptrdiff_t num_rows = find_rows(i, q_, rows);
      pack_queries(rows, num_rows, layer_.head_dim, scale, to.queries);
      std::memset(to.accumulator, 0, static_cast<std::size_t>(2 * steps_ * kTileBytes + kLineBytes));  // and the sum
      std::fill_n(to.reference, kTileRows, -std::numeric_limits<float>::infinity());
    }
  }

  ANTIPHON_AVX512_BF16 void store() const {
    for (std::ptrdiff_t i = 0; i < num_tiles_; ++i) {
      prefetch_rows<true>(i + 2, out_);
      float* rows[kTileRows];
      const std::ptrdiff_t num_rows = find_rows(i, out_, rows);
      store_rows(tile(i), num_rows, layer_.head_dim, rows);
    }
  }

  // Packs runs [first, first + count), fetching the pages of the runs after them, and lets every row go through them.
  ANTIPHON_AVX512_BF16 void run_chunk(std::ptrdiff_t first, std::ptrdiff_t count) {
    PagePrefetch prefetch;
    for (std::ptrdiff_t i = first + count; i < std::min(num_runs(), first + 2 * count); ++i) {
      prefetch.add(item_.at(layer_.k, item_.page(runs_[i])));
      prefetch.add(item_.at(layer_.v, item_.page(runs_[i])));
    }
    std::ptrdiff_t num_units = 0;
    for (std::ptrdiff_t i = 0; i < count; ++i) num_units += find_tiles(runs_[first + i], places_[i]);
    prefetch.start(item_.page_bytes(), Form::prefetches(steps_) * num_units + 8 * steps_ * count);  // in units and in packing
    for (std::ptrdiff_t i = 0; i < count; ++i) pack(runs_[first + i], places_[i], prefetch);
    for (std::ptrdiff_t tile = 0; tile < num_tiles_; tile += kGroupTiles) {
      Unit units[kChunkBlocks * kGroupTiles];
      num_units = 0;
      for (std::ptrdiff_t i = 0; i < count; ++i) {
        const std::ptrdiff_t end = std::min(tile + kGroupTiles, places_[i].end_tile);
        for (std::ptrdiff_t at = std::max(tile, places_[i].first_tile); at < end; ++at) {
          if (set_unit(places_[i], at, units[num_units])) ++num_units;
        }
      }
      Form::template run_units<kInt8>(units, num_units, scratch_, prefetch);
    }
  }

  // A page in the present chunk, the row tiles that may see some of it, and how many keys each row sees.
  struct Place {
    PackedBlock block;
    char* keys;
    char* values;
    float* k_scale;
    float* v_scale;
    std::int32_t* seen;
    std::ptrdiff_t first_tile;
    std::ptrdiff_t end_tile;
    std::ptrdiff_t num_keys;
    bool all_seen;  // every row of every tile sees every key
  };

  // Returns how many tiles there are.
  std::ptrdiff_t find_tiles(const ItemRun& run, Place& place) const {
    place.first_tile = run.first_row / kTileRows;
    place.end_tile = ceil_div(run.end_row, kTileRows);
    place.all_seen = run.first_row == 0 && run.end_row == item_.num_rows() && item_.sees_all(run);
    if (place.all_seen) {
      std::fill_n(place.seen, kTileRows, static_cast<std::int32_t>(kPageKeys));  // of whichever tile
      place.num_keys = kPageKeys;
      return place.end_tile - place.first_tile;
    }
    std::fill(place.seen + place.first_tile * kTileRows, place.seen + place.end_tile * kTileRows, 0);
    place.num_keys = item_.count_seen(run, place.seen);
    if (run.end_row == item_.num_rows()) {  // lanes without a row do as the last one does
      std::fill(place.seen + run.end_row, place.seen + place.end_tile * kTileRows, place.seen[run.end_row - 1]);
    }
    return place.end_tile - place.first_tile;
  }

  // False where the tile sees nothing of the page.
  bool set_unit(const Place& place, std::ptrdiff_t index, Unit& unit) const {
    unit.block = &place.block;
    unit.tile = tile(index);
    unit.tile.seen = place.seen + (place.all_seen ? 0 : index * kTileRows);
    unit.tile.masked = false;
    if (place.all_seen) return true;
    std::int32_t fewest = kPageKeys, most = 0;
    for (std::ptrdiff_t row = 0; row < kTileRows; ++row) {
      fewest = std::min(fewest, unit.tile.seen[row]);
      most = std::max(most, unit.tile.seen[row]);
    }
    unit.tile.masked = fewest < kPageKeys;
    return most > 0;
  }

  ANTIPHON_AVX512_BF16 void pack(const ItemRun& run, Place& place, PagePrefetch& prefetch) const {
    const std::ptrdiff_t page = item_.page(run), slot = item_.slot(page);
    PackedBlock& block = place.block;
    block = PackedBlock{};
    block.steps = steps_;
    block.first = run.block == 0;
    block.first_bad_key = kPageKeys;
    block.key_bytes = steps_ * kLineBytes;
    block.keys = lines_of(item_.at(layer_.k, page), place.num_keys, place.keys);
    const char* values = lines_of(item_.at(layer_.v, page), place.num_keys, lines_);
    if (kInt8) {
      pack_scales(layer_.k_scale + slot, place.num_keys, place.k_scale);
      pack_scales(layer_.v_scale + slot, place.num_keys, place.v_scale);
      block.k_scale = place.k_scale;
      block.v_scale = place.v_scale;
    } else if (!all_finite(values, kPageKeys * block.key_bytes)) {
      if (values != lines_) std::memcpy(lines_, values, static_cast<std::size_t>(kPageKeys * block.key_bytes));
      values = lines_;
      block.first_bad_key = clear_bad_lines(block.key_bytes, lines_);
    }
    pack_values(values, steps_, place.values, prefetch);
    block.values = place.values;
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

  std::ptrdiff_t num_runs() const { return static_cast<std::ptrdiff_t>(runs_.size()); }

  const ItemView& item_;
  const KvLayer& layer_;
  const float* q_;
  float* out_;
  std::ptrdiff_t steps_;
  std::ptrdiff_t num_tiles_;
  std::vector<ItemRun> runs_;
  char* start_ = nullptr;
  std::ptrdiff_t taken_bytes_ = 0;
  Scratch scratch_{};
  char* lines_ = nullptr;  // values of one page, where they need a copy
  Place places_[kChunkBlocks] = {};
  std::ptrdiff_t* elements_ = nullptr;  // of each row, where it begins in q and out
  char* tiles_ = nullptr;
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

template <typename Form>
void run_item(const ItemView& item, const KvLayer& layer, const float* q, float* out, Workspace& workspace) {
  const FlushSubnormals flush;
  if (layer.storage == KvStorage::kInt8) {
    Work<Form, true>(item, layer, q, out, workspace).run();
  } else {
    Work<Form, false>(item, layer, q, out, workspace).run();
  }
}

}  // namespace antiphon::cpu::bf16
