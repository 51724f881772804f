// One item of attention under one KV head: which rows it has, and which members read which page. See attention.h.
//
// Rows are tokens x grouped heads, member after member, token after token.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cpu/attention.h"

namespace antiphon::cpu {

// Members [first, end) read the same page as this block of theirs; their rows are [first_row, end_row) of the item.
struct ItemRun {
  std::ptrdiff_t block;
  std::ptrdiff_t first;
  std::ptrdiff_t end;
  std::ptrdiff_t first_row;
  std::ptrdiff_t end_row;
};

class ItemView {
 public:
  ItemView(const AttentionPlan& plan, const KvLayer& layer, const AttentionItem& item, std::ptrdiff_t kv_head)
      : layer_(layer),
        item_(item),
        members_(plan.members().data() + item.first_member),
        num_groups_(plan.num_groups()),
        kv_head_(kv_head) {}

  std::ptrdiff_t num_rows() const { return item_.num_tokens * num_groups_; }
  const AttentionMember& member(std::ptrdiff_t i) const { return members_[i]; }

  // The item's rows of a tensor [tokens, heads, head_dim]: visit(row, first element) for each.
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

  // visit(run) for each page that members read, blocks in ascending order.
  template <typename Visit>
  void for_each_run(Visit&& visit) const {
    for (std::ptrdiff_t block = 0; block < item_.num_blocks; ++block) {
      ItemRun run{block, 0, 0, 0, 0};
      for (; run.first < item_.num_members; run.first = run.end, run.first_row = run.end_row) {
        run.end_row = run.first_row + members_[run.first].num_tokens * num_groups_;
        for (run.end = run.first + 1; run.end < item_.num_members && same_page(run.first, run.end, block); ++run.end) {
          run.end_row += members_[run.end].num_tokens * num_groups_;
        }
        if (block < members_[run.first].num_blocks()) visit(run);
      }
    }
  }

  // Whether every row of the run sees every key of its block.
  bool sees_all(const ItemRun& run) const {
    for (std::ptrdiff_t i = run.first; i < run.end; ++i) {
      if (members_[i].first_position < (run.block + 1) * kPageKeys - 1) return false;
    }
    return true;
  }

  // seen[row] for the run's rows: how many keys of its block each sees. Returns the most.
  std::ptrdiff_t count_seen(const ItemRun& run, std::int32_t* seen) const {
    std::ptrdiff_t most = 0;
    std::ptrdiff_t row = run.first_row;
    for (std::ptrdiff_t i = run.first; i < run.end; ++i) {
      for (std::ptrdiff_t token = 0; token < members_[i].num_tokens; ++token) {
        const std::ptrdiff_t count = std::clamp<std::ptrdiff_t>(
            members_[i].first_position + token - run.block * kPageKeys + 1, 0, kPageKeys);
        most = std::max(most, count);
        for (std::ptrdiff_t group = 0; group < num_groups_; ++group) seen[row++] = static_cast<std::int32_t>(count);
      }
    }
    return most;
  }

  // Of the run's block, and of the one after it; the latter is -1 at the end.
  std::ptrdiff_t page(const ItemRun& run) const { return members_[run.first].pages[run.block]; }
  std::ptrdiff_t next_page(const ItemRun& run) const {
    return run.block + 1 < members_[run.first].num_blocks() ? members_[run.first].pages[run.block + 1] : -1;
  }

  std::ptrdiff_t slot(std::ptrdiff_t page) const { return kv_head_ * layer_.num_slots + page * kPageKeys; }

  const char* at(const void* pool, std::ptrdiff_t page) const {
    return static_cast<const char*>(pool) + slot(page) * layer_.head_dim * element_bytes(layer_.storage);
  }

  std::ptrdiff_t page_bytes() const { return kPageKeys * layer_.head_dim * element_bytes(layer_.storage); }

 private:
  bool same_page(std::ptrdiff_t a, std::ptrdiff_t b, std::ptrdiff_t block) const {
    return block < members_[a].num_blocks() && block < members_[b].num_blocks() &&
           members_[a].pages[block] == members_[b].pages[block];
  }

  const KvLayer& layer_;
  const AttentionItem& item_;
  const AttentionMember* members_;
  std::ptrdiff_t num_groups_;
  std::ptrdiff_t kv_head_;
};

}  // namespace antiphon::cpu
