// Attention, item by item: blocks in ascending order, each packed once for all rows of the item that read it.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention_item.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kLineBytes = 64;
constexpr double kLog2E = 1.4426950408889634;

// What an item needs to go from block to block, in one thread's workspace. Rows are tokens x grouped heads, member
// after member, token after token.
struct State {
  float* q;            // [rows][head_dim], scaled
  float* accumulator;  // [rows][padded]
  float* max;          // [rows]
  float* sum;          // [rows]
  float* keys;         // one packed block
  float* values;
  std::int32_t* num_seen;  // [rows], of the present block
  std::ptrdiff_t padded;

  static State in(Workspace& workspace, std::ptrdiff_t num_rows, std::ptrdiff_t head_dim) {
    State state;
    state.padded = round_up(head_dim, kPanel);
    const std::ptrdiff_t rows = round_up(num_rows, kPanel);
    float* next = workspace.at_least<float>(rows * (state.padded + round_up(head_dim, kPanel) + 3) +
                                            2 * kPageKeys * state.padded);
    const auto take = [&next](std::ptrdiff_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    state.keys = take(kPageKeys * state.padded);
    state.values = take(kPageKeys * state.padded);
    state.accumulator = take(rows * state.padded);
    state.q = take(rows * state.padded);
    state.max = take(rows);
    state.sum = take(rows);
    state.num_seen = reinterpret_cast<std::int32_t*>(take(rows));
    return state;
  }
};

// One item under one KV head.
class Work {
 public:
  Work(const AttentionForm& form, const KvLayer& layer, const ItemView& item, Workspace& workspace)
      : form_(form), layer_(layer), item_(item), state_(State::in(workspace, item.num_rows(), layer.head_dim)) {}

  void run(const float* q, float* out) const {
    load_queries(q);
    item_.for_each_run([this](const ItemRun& run) { run_block(run); });
    store(out);
  }

 private:
  void load_queries(const float* q) const {
    const std::ptrdiff_t head_dim = layer_.head_dim;
    const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(head_dim)));
    item_.for_each_row([&](std::ptrdiff_t row, std::ptrdiff_t element) {
      for (std::ptrdiff_t i = 0; i < head_dim; ++i) state_.q[row * head_dim + i] = q[element + i] * scale;
      std::fill_n(state_.accumulator + row * state_.padded, state_.padded, 0.0f);
      state_.max[row] = -std::numeric_limits<float>::infinity();
      state_.sum[row] = 0.0f;
    });
  }

  void store(float* out) const {
    item_.for_each_row([&](std::ptrdiff_t row, std::ptrdiff_t element) {
      const float inverse = 1.0f / state_.sum[row];
      const float* accumulator = state_.accumulator + row * state_.padded;
      for (std::ptrdiff_t i = 0; i < layer_.head_dim; ++i) out[element + i] = accumulator[i] * inverse;
    });
  }

  void run_block(const ItemRun& run) const {
    const std::ptrdiff_t num_keys = item_.count_seen(run, state_.num_seen);
    std::ptrdiff_t first_row = run.first_row;
    while (state_.num_seen[first_row] == 0) ++first_row;  // tokens of earlier blocks
    const std::ptrdiff_t page = item_.page(run);
    const int storage = static_cast<int>(layer_.storage);
    form_.pack_keys[storage](item_.at(layer_.k, page), num_keys, layer_.head_dim, state_.keys);
    form_.pack_values[storage](item_.at(layer_.v, page), num_keys, layer_.head_dim, state_.values);
    AttentionTile tile = tile_of(page, num_keys);
    const std::ptrdiff_t next = item_.next_page(run);
    if (next >= 0) {
      tile.next_keys = item_.at(layer_.k, next);
      tile.next_values = item_.at(layer_.v, next);
      tile.next_bytes = item_.page_bytes();
    }
    run_tiles(tile, first_row, run.end_row);
  }

  AttentionTile tile_of(std::ptrdiff_t page, std::ptrdiff_t num_keys) const {
    AttentionTile tile{};
    tile.keys = state_.keys;
    tile.values = state_.values;
    tile.k_scale = layer_.k_scale != nullptr ? layer_.k_scale + item_.slot(page) : nullptr;
    tile.v_scale = layer_.v_scale != nullptr ? layer_.v_scale + item_.slot(page) : nullptr;
    tile.num_keys = num_keys;
    tile.head_dim = layer_.head_dim;
    return tile;
  }

  // Runs rows [row, end_row) in tiles; each prefetches its share of the next block.
  void run_tiles(AttentionTile tile, std::ptrdiff_t row, std::ptrdiff_t end_row) const {
    std::ptrdiff_t left_bytes = tile.next_bytes;
    for (std::ptrdiff_t tiles = (end_row - row + kAttentionTileRows - 1) / kAttentionTileRows; tiles > 0; --tiles) {
      const std::ptrdiff_t rows = (end_row - row + tiles - 1) / tiles;  // 7 rows are 4 + 3, not 6 + 1
      tile.q = state_.q + row * layer_.head_dim;
      tile.accumulator = state_.accumulator + row * state_.padded;
      tile.max = state_.max + row;
      tile.sum = state_.sum + row;
      tile.num_seen = state_.num_seen + row;
      tile.next_bytes = std::min(left_bytes, round_up(left_bytes / tiles, kLineBytes));
      form_.tiles[rows - 1](tile);
      tile.next_keys += tile.next_bytes;
      tile.next_values += tile.next_bytes;
      left_bytes -= tile.next_bytes;
      row += rows;
    }
  }

  const AttentionForm& form_;
  const KvLayer& layer_;
  const ItemView& item_;
  State state_;
};

}  // namespace

void paged_attention(const AttentionForm& form, const AttentionPlan& plan, const KvLayer& layer, const float* q,
                     float* out) {
  const std::ptrdiff_t num_tasks = static_cast<std::ptrdiff_t>(plan.items().size()) * layer.num_kv_heads;
  parallel_for(num_tasks, [&](std::ptrdiff_t task, int) {
    thread_local Workspace workspace;
    const AttentionItem& planned = plan.items()[static_cast<std::size_t>(task / layer.num_kv_heads)];
    const ItemView item(plan, layer, planned, task % layer.num_kv_heads);
    if (form.run_item != nullptr) {
      form.run_item(item, layer, q, out, workspace);
    } else {
      Work(form, layer, item, workspace).run(q, out);
    }
  });
}

}  // namespace antiphon::cpu
