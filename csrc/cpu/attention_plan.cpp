// How a batch's tokens are cut into items of attention. Nothing here can change a bit of the result: see attention.h.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cpu/attention.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kFewestItemRows = 12;

// Most tokens of an item of about `rows` query rows, so that its rows fill whole tiles.
std::ptrdiff_t tokens_of(std::ptrdiff_t rows, std::ptrdiff_t tile_rows, std::ptrdiff_t num_groups) {
  const std::ptrdiff_t step = tile_rows / std::gcd(tile_rows, num_groups);
  const std::ptrdiff_t tokens = rows / num_groups;
  return std::max<std::ptrdiff_t>(1, tokens < step ? tokens : tokens / step * step);
}

bool reads_before(const AttentionMember& a, const AttentionMember& b) {
  return std::lexicographical_compare(a.pages, a.pages + a.num_blocks(), b.pages, b.pages + b.num_blocks());
}

// Whether half of the pages that the shorter reads, or more, are the other's too.
bool shares_pages(const AttentionMember& a, const AttentionMember& b) {
  const std::ptrdiff_t num_blocks = std::min(a.num_blocks(), b.num_blocks());
  std::ptrdiff_t shared = 0;
  while (shared < num_blocks && a.pages[shared] == b.pages[shared]) ++shared;
  return 2 * shared >= num_blocks;
}

[[noreturn]] void refuse(std::ptrdiff_t row, const char* why) {
  throw std::invalid_argument("row " + std::to_string(row) + " of the attention plan " + why);
}

}  // namespace

AttentionPlan::AttentionPlan(const std::int32_t* block_tables, std::ptrdiff_t table_pages,
                             const std::int64_t* row_starts, const std::int64_t* context_tokens,
                             std::ptrdiff_t num_rows, std::ptrdiff_t num_pages, std::ptrdiff_t num_groups,
                             std::ptrdiff_t num_kv_heads, int num_threads, AttentionCut form_cut)
    : num_groups_(num_groups), num_kv_heads_(num_kv_heads), num_tokens_(row_starts[num_rows]) {
  if (row_starts[0] != 0) throw std::invalid_argument("the attention plan's rows do not start at token 0");
  std::vector<AttentionMember> rows;
  for (std::ptrdiff_t row = 0; row < num_rows; ++row) {
    const std::ptrdiff_t num_tokens = row_starts[row + 1] - row_starts[row];
    if (num_tokens < 0 || context_tokens[row] < 0) refuse(row, "has a negative length");
    if (num_tokens == 0) continue;
    const std::int64_t room = table_pages * kPageKeys;
    if (num_tokens > room || context_tokens[row] > room - num_tokens) {
      refuse(row, "has more tokens than its block table has pages for");
    }
    rows.push_back({block_tables + row * table_pages, row_starts[row], num_tokens, context_tokens[row]});
    const AttentionMember& member = rows.back();
    for (std::ptrdiff_t block = 0; block < member.num_blocks(); ++block) {
      const std::int32_t page = member.pages[block];
      if (page < 0 || page >= num_pages) refuse(row, "has a page that is not in the pool");
    }
  }
  std::ptrdiff_t item_rows = form_cut.item_rows;
  cut_rows(rows, tokens_of(item_rows, form_cut.tile_rows, num_groups));
  // Rather a page packed twice than a thread that waits.
  while (item_rows > kFewestItemRows && static_cast<std::ptrdiff_t>(items_.size()) * num_kv_heads < num_threads) {
    item_rows /= 2;
    cut_rows(rows, tokens_of(item_rows, form_cut.tile_rows, num_groups));
  }
  std::stable_sort(items_.begin(), items_.end(), [](const AttentionItem& a, const AttentionItem& b) {
    return a.num_tokens * a.num_blocks > b.num_tokens * b.num_blocks;  // the long ones first: no straggler at the end
  });
}

void AttentionPlan::cut_rows(const std::vector<AttentionMember>& rows, std::ptrdiff_t most_tokens) {
  members_.clear();
  items_.clear();
  for (const AttentionMember& row : rows) {
    for (std::ptrdiff_t token = 0; token < row.num_tokens; token += most_tokens) {
      members_.push_back({row.pages, row.first_token + token, std::min(most_tokens, row.num_tokens - token),
                          row.first_position + token});
    }
  }
  std::stable_sort(members_.begin(), members_.end(), reads_before);
  for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(members_.size()); ++i) {
    const AttentionMember& member = members_[i];
    if (!items_.empty()) {
      AttentionItem& last = items_.back();
      if (last.num_tokens + member.num_tokens <= most_tokens && shares_pages(members_[i - 1], member)) {
        last.num_members += 1;
        last.num_tokens += member.num_tokens;
        last.num_blocks = std::max(last.num_blocks, member.num_blocks());
        continue;
      }
    }
    items_.push_back({i, 1, member.num_tokens, member.num_blocks()});
  }
}

}  // namespace antiphon::cpu
