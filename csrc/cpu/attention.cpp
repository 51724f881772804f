// Attention, item by item: blocks in ascending order, each packed once for all rows of the item that read it.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

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
  Work(const AttentionForm& form, const AttentionPlan& plan, const KvLayer& layer, const AttentionItem& item,
       std::ptrdiff_t kv_head, Workspace& workspace)
      : form_(form),
        layer_(layer),
        item_(item),
        members_(plan.members().data() + item.first_member),
        num_groups_(plan.num_groups()),
        kv_head_(kv_head),
        state_(State::in(workspace, item.num_tokens * plan.num_groups(), layer.head_dim)) {}

  void run(const float* q, float* out) const {
    load_queries(q);
    for (std::ptrdiff_t block = 0; block < item_.num_blocks; ++block) {
      std::ptrdiff_t first_row = 0;
      for (std::ptrdiff_t first = 0, end; first < item_.num_members; first = end) {
        std::ptrdiff_t end_row = first_row + members_[first].num_tokens * num_groups_;
        for (end = first + 1; end < item_.num_members && same_page(first, end, block); ++end) {
          end_row += members_[end].num_tokens * num_groups_;
        }
        if (block < members_[first].num_blocks()) run_block(block, first, end, first_row);
        first_row = end_row;
      }
    }
    store(out);
  }

 private:
  // The item's rows of tensor [tokens, heads, head_dim]: visit(row, first element) for each.
  template <typename Visit>
  void for_each_row(Visit&& visit) const {
    const std::ptrdiff_t num_heads = layer_.num_kv_heads * num_groups_;
    std::ptrdiff_t row = 0;
    for (std::ptrdiff_t i = 0; i < item_.num_members; ++i) {
      for (std::ptrdiff_t token = 0; token < members_[i].num_tokens; ++token) {
        const std::ptrdiff_t head = (members_[i].first_token + token) * num_heads + kv_head_ * num_groups_;
        for (std::ptrdiff_t group = 0; group < num_groups_; ++group) {
          visit(row++, (head + group) * layer_.head_dim);
        }
      }
    }
  }

  void load_queries(const float* q) const {
    const std::ptrdiff_t head_dim = layer_.head_dim;
    const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(head_dim)));
    for_each_row([&](std::ptrdiff_t row, std::ptrdiff_t element) {
      for (std::ptrdiff_t i = 0; i < head_dim; ++i) state_.q[row * head_dim + i] = q[element + i] * scale;
      std::fill_n(state_.accumulator + row * state_.padded, state_.padded, 0.0f);
      state_.max[row] = -std::numeric_limits<float>::infinity();
      state_.sum[row] = 0.0f;
    });
  }

  void store(float* out) const {
    for_each_row([&](std::ptrdiff_t row, std::ptrdiff_t element) {
      const float inverse = 1.0f / state_.sum[row];
      const float* accumulator = state_.accumulator + row * state_.padded;
      for (std::ptrdiff_t i = 0; i < layer_.head_dim; ++i) out[element + i] = accumulator[i] * inverse;
    });
  }

  bool same_page(std::ptrdiff_t a, std::ptrdiff_t b, std::ptrdiff_t block) const {
    return block < members_[a].num_blocks() && block < members_[b].num_blocks() &&
           members_[a].pages[block] == members_[b].pages[block];
  }

  std::ptrdiff_t slot(std::ptrdiff_t page) const { return kv_head_ * layer_.num_slots + page * kPageKeys; }

  const char* at(const void* pool, std::ptrdiff_t page) const {
    return static_cast<const char*>(pool) + slot(page) * layer_.head_dim * element_bytes(layer_.storage);
  }

  // One block for members [first, end), who all read the page of the first; their rows start at first_row.
  void run_block(std::ptrdiff_t block, std::ptrdiff_t first, std::ptrdiff_t end, std::ptrdiff_t first_row) const {
    std::ptrdiff_t num_keys = 0;
    std::ptrdiff_t end_row = first_row;
    for (std::ptrdiff_t i = first; i < end; ++i) {
      for (std::ptrdiff_t token = 0; token < members_[i].num_tokens; ++token) {
        const std::ptrdiff_t seen = std::clamp<std::ptrdiff_t>(
            members_[i].first_position + token - block * kPageKeys + 1, 0, kPageKeys);
        num_keys = std::max(num_keys, seen);
        for (std::ptrdiff_t group = 0; group < num_groups_; ++group) {
          state_.num_seen[end_row++] = static_cast<std::int32_t>(seen);
        }
      }
    }
    while (state_.num_seen[first_row] == 0) ++first_row;  // tokens of earlier blocks
    const std::int32_t* pages = members_[first].pages;
    const int storage = static_cast<int>(layer_.storage);
    form_.pack_keys[storage](at(layer_.k, pages[block]), num_keys, layer_.head_dim, state_.keys);
    form_.pack_values[storage](at(layer_.v, pages[block]), num_keys, layer_.head_dim, state_.values);
    AttentionTile tile = tile_of(pages[block], num_keys);
    if (block + 1 < members_[first].num_blocks()) {
      tile.next_keys = at(layer_.k, pages[block + 1]);
      tile.next_values = at(layer_.v, pages[block + 1]);
      tile.next_bytes = kPageKeys * layer_.head_dim * element_bytes(layer_.storage);
    }
    run_tiles(tile, first_row, end_row);
  }

  AttentionTile tile_of(std::ptrdiff_t page, std::ptrdiff_t num_keys) const {
    AttentionTile tile{};
    tile.keys = state_.keys;
    tile.values = state_.values;
    tile.k_scale = layer_.k_scale != nullptr ? layer_.k_scale + slot(page) : nullptr;
    tile.v_scale = layer_.v_scale != nullptr ? layer_.v_scale + slot(page) : nullptr;
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
  const AttentionItem& item_;
  const AttentionMember* members_;
  std::ptrdiff_t num_groups_;
  std::ptrdiff_t kv_head_;
  State state_;
};

}  // namespace

void paged_attention(const AttentionForm& form, const AttentionPlan& plan, const KvLayer& layer, const float* q,
                     float* out) {
  const std::ptrdiff_t num_tasks = static_cast<std::ptrdiff_t>(plan.items().size()) * layer.num_kv_heads;
  parallel_for(num_tasks, [&](std::ptrdiff_t task, int) {
    thread_local Workspace workspace;
    const AttentionItem& item = plan.items()[static_cast<std::size_t>(task / layer.num_kv_heads)];
    Work(form, plan, layer, item, task % layer.num_kv_heads, workspace).run(q, out);
  });
}

}  // namespace antiphon::cpu
