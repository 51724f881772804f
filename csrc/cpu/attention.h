// Paged attention on the CPU: read, extend and decode by one kernel, float32 from float32, bfloat16 or int8 keys.
// What follows holds for the portable and the AVX2 form; attention_bf16.h says what those of AMX and AVX-512 BF16 do.
//
// A block is one page: 64 keys at positions 64 b to 64 b + 63. A query at position p of a row sees keys 0 to p. Its
// result is computed in one order that p alone determines, whoever else is in the batch and however the work is cut:
//   query   q is first scaled by log2(e) / sqrt(head_dim), so that exp is exp2
//   blocks  in ascending b, one at a time: keys 0 to n - 1 of it are seen, n = min(64, p - 64 b + 1)
//   scores  s_j = one chain of multiply-adds over head_dim, ascending; times k_scale[j] for int8
//   softmax max' = max(max, s_j); w_j = exp2(s_j - max'); c = exp2(max - max')
//           sum = c * sum + (the w_j, key j in lane j mod 8 ascending, then the lanes as a tree)
//   values  accumulator = c * accumulator, then one chain of multiply-adds over keys 0 to n - 1, ascending;
//           w_j is first multiplied by v_scale[j] for int8
//   out     accumulator * (1 / sum)
// Keys past n are not multiplied by 0, they are not touched: what lies there may be NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/kv_layer.h"

namespace antiphon::cpu {

constexpr std::ptrdiff_t kPanel = 16;              // keys (or value columns) that lie beside each other once packed
constexpr std::ptrdiff_t kAttentionTileRows = 6;   // most rows of a tile

// Up to 6 query rows over one packed block.
struct AttentionTile {
  const float* q;         // [rows][head_dim], scaled
  float* accumulator;     // [rows][padded head_dim]
  float* max;             // [rows]
  float* sum;             // [rows]
  const std::int32_t* num_seen;  // [rows]: keys of this block that the row sees, 0 to num_keys
  const float* keys;      // [panels of keys][head_dim][16]
  const float* values;    // [panels of columns][num_keys][16]
  const float* k_scale;   // [num_keys] or null
  const float* v_scale;
  std::ptrdiff_t num_keys;
  std::ptrdiff_t head_dim;
  const char* next_keys;  // bytes of the block after this one, to be prefetched on the way: this tile's share
  const char* next_values;
  std::ptrdiff_t next_bytes;
};

// Widens num_keys rows [head_dim] of a page to float32 and packs them.
using PackFunction = void (*)(const void* page, std::ptrdiff_t num_keys, std::ptrdiff_t head_dim, float* packed);
using AttentionTileFunction = void (*)(const AttentionTile&);

class ItemView;
class Workspace;
using AttentionItemFunction = void (*)(const ItemView&, const KvLayer&, const float* q, float* out, Workspace&);

// How a form likes its items: about so many query rows, in tiles of so many.
struct AttentionCut {
  std::ptrdiff_t item_rows = 96;  // a block is packed once for all of them, which then costs 3 % at 96 rows of 64
  std::ptrdiff_t tile_rows = kAttentionTileRows;
};

// The form of one instruction set: [storage], [rows - 1]; or a function that runs whole items in its own way.
struct AttentionForm {
  PackFunction pack_keys[3] = {};
  PackFunction pack_values[3] = {};
  AttentionTileFunction tiles[kAttentionTileRows] = {};
  AttentionItemFunction run_item = nullptr;
  AttentionCut cut = {};
};

extern const AttentionForm kPortableAttention;
#if defined(__x86_64__)
extern const AttentionForm kAvx2Attention;
// bfloat16 and int8; only where cpu_features() has the instructions.
extern const AttentionForm kAmxAttention;
extern const AttentionForm kAvx512Bf16Attention;
#endif

// Some new tokens of one row of the batch.
struct AttentionMember {
  const std::int32_t* pages;  // the row's block table
  std::ptrdiff_t first_token;
  std::ptrdiff_t num_tokens;
  std::ptrdiff_t first_position;

  std::ptrdiff_t num_blocks() const { return (first_position + num_tokens - 1) / kPageKeys + 1; }
};

// What one thread takes on at a time, for each KV head: members that, where they can, read the same pages.
struct AttentionItem {
  std::ptrdiff_t first_member;
  std::ptrdiff_t num_members;
  std::ptrdiff_t num_tokens;
  std::ptrdiff_t num_blocks;
};

// The cut of a batch's tokens into items: made once, used by every layer. It cannot change a bit of the result.
// `block_tables` [num_rows, table_pages] must live as long as the plan; row_starts is [num_rows + 1], context_tokens
// [num_rows]. `num_groups` is query heads per KV head, `cut` the form's. std::invalid_argument where a row has tokens
// without a page in [0, num_pages), or rows do not follow each other from token 0 on.
class AttentionPlan {
 public:
  AttentionPlan(const std::int32_t* block_tables, std::ptrdiff_t table_pages, const std::int64_t* row_starts,
                const std::int64_t* context_tokens, std::ptrdiff_t num_rows, std::ptrdiff_t num_pages,
                std::ptrdiff_t num_groups, std::ptrdiff_t num_kv_heads, int num_threads, AttentionCut cut = {});

  const std::vector<AttentionMember>& members() const { return members_; }
  const std::vector<AttentionItem>& items() const { return items_; }
  std::ptrdiff_t num_groups() const { return num_groups_; }
  std::ptrdiff_t num_kv_heads() const { return num_kv_heads_; }
  std::ptrdiff_t num_tokens() const { return num_tokens_; }

 private:
  void cut_rows(const std::vector<AttentionMember>& rows, std::ptrdiff_t most_tokens);

  std::vector<AttentionMember> members_;
  std::vector<AttentionItem> items_;
  std::ptrdiff_t num_groups_;
  std::ptrdiff_t num_kv_heads_;
  std::ptrdiff_t num_tokens_;
};

// q and out are float32 [tokens, num_kv_heads * num_groups, head_dim], contiguous.
void paged_attention(const AttentionForm& form, const AttentionPlan& plan, const KvLayer& layer, const float* q,
                     float* out);

}  // namespace antiphon::cpu
