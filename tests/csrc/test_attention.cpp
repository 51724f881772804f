// Paged attention against softmax in float64: pages shared, scattered and partly filled, all storages, every form here.
#include <algorithm>
#include <array>

#include "check.h"
#include "cpu/attention.h"
#include "cpu/cpu_features.h"
#include "cpu/pool.h"
#include "operands.h"

namespace {

using namespace antiphon::cpu;
using namespace antiphon::testing;

struct Row {
  std::ptrdiff_t context, num_tokens;
  std::array<std::int32_t, 4> pages;
};

// Two rows share pages 0 to 2; one has nothing; page 8, the last, has 5 keys, and the pool ends with them.
const std::vector<Row> kRows = {{0, 1, {6}},           {130, 70, {0, 1, 2, 5}}, {0, 0, {}},
                                {199, 1, {0, 1, 2, 7}}, {61, 3, {4}},            {64, 5, {3, 8}}};
constexpr std::ptrdiff_t kNumPages = 9;
constexpr std::ptrdiff_t kNumSlots = 8 * kPageKeys + 5;

struct Shape {
  std::ptrdiff_t num_kv_heads, num_groups, head_dim;
  std::ptrdiff_t token_size() const { return num_kv_heads * num_groups * head_dim; }
};

constexpr Shape kShapes[] = {{1, 1, 5}, {2, 3, 16}, {2, 4, 40}, {1, 7, 64}};

std::ptrdiff_t slot_of(const Row& row, std::ptrdiff_t key) {
  return row.pages[static_cast<std::size_t>(key / kPageKeys)] * kPageKeys + key % kPageKeys;
}

// One of K and V. All bits are set, so NaN (for int8, the scale is), in slots that no row has filled.
struct Half {
  Half(const Shape& shape, KvStorage of, std::uint32_t seed)
      : storage(of),
        head_dim(shape.head_dim),
        data(static_cast<std::size_t>(shape.num_kv_heads * kNumSlots * head_dim * element_bytes(of)), '\xff'),
        scales(poison(of == KvStorage::kInt8 ? shape.num_kv_heads * kNumSlots : 0)) {
    const Floats all = values(shape.num_kv_heads * kNumSlots * head_dim, seed);
    for (const Row& row : kRows) {
      for (std::ptrdiff_t i = 0; i < (row.context + row.num_tokens) * shape.num_kv_heads; ++i) {
        fill(i % shape.num_kv_heads * kNumSlots + slot_of(row, i / shape.num_kv_heads), all);
      }
    }
  }

  void fill(std::ptrdiff_t slot, const Floats& all) {
    if (storage == KvStorage::kInt8) scales.data()[slot] = static_cast<float>(1 + slot % 7) / 128.0f;
    for (std::ptrdiff_t i = slot * head_dim; i < (slot + 1) * head_dim; ++i) store(storage, all.data()[i], data, i);
  }

  double at(std::ptrdiff_t slot, std::ptrdiff_t i) const {
    const double scale = storage == KvStorage::kInt8 ? scales.data()[slot] : 1.0;
    return scale * stored(storage, data, slot * head_dim + i);
  }

  KvStorage storage;
  std::ptrdiff_t head_dim;
  std::vector<char> data;
  Floats scales;
};

struct Pool {
  Pool(const Shape& of, KvStorage storage) : shape(of), k(of, storage, 1), v(of, storage, 2) {
    const bool scaled = storage == KvStorage::kInt8;
    layer = {k.data.data(), v.data.data(), scaled ? k.scales.data() : nullptr, scaled ? v.scales.data() : nullptr,
             storage, of.num_kv_heads, kNumSlots, of.head_dim};
  }
  Shape shape;
  Half k, v;
  KvLayer layer;
};

Floats run(const AttentionForm& form, const Pool& pool, const std::vector<Row>& rows, const Floats& q) {
  std::vector<std::int32_t> tables;
  std::vector<std::int64_t> starts{0}, contexts;
  for (const Row& row : rows) {
    tables.insert(tables.end(), row.pages.begin(), row.pages.end());
    starts.push_back(starts.back() + row.num_tokens);
    contexts.push_back(row.context);
  }
  const AttentionPlan plan(tables.data(), 4, starts.data(), contexts.data(), static_cast<std::ptrdiff_t>(rows.size()),
                           kNumPages, pool.shape.num_groups, pool.shape.num_kv_heads, num_threads(), form.cut);
  Floats out = poison(static_cast<std::ptrdiff_t>(q.size()));
  paged_attention(form, plan, pool.layer, q.data(), out.data());
  return out;
}

std::vector<double> expected(const Pool& pool, const Floats& q) {
  const std::ptrdiff_t num_heads = pool.shape.num_kv_heads * pool.shape.num_groups, size = pool.shape.head_dim;
  std::vector<double> outs(q.size(), 0.0);
  std::ptrdiff_t first = 0;  // element of the present token and head
  for (const Row& row : kRows) {
    for (std::ptrdiff_t query = 0; query < row.num_tokens * num_heads; ++query, first += size) {
      double* out = outs.data() + first;
      double sum = 0.0;
      for (std::ptrdiff_t key = 0; key <= row.context + query / num_heads; ++key) {
        const std::ptrdiff_t slot = query % num_heads / pool.shape.num_groups * kNumSlots + slot_of(row, key);
        double score = 0.0;
        for (std::ptrdiff_t i = 0; i < size; ++i) score += q.data()[first + i] * pool.k.at(slot, i);
        const double weight = std::exp(score / std::sqrt(static_cast<double>(size)));
        sum += weight;
        for (std::ptrdiff_t i = 0; i < size; ++i) out[i] += weight * pool.v.at(slot, i);
      }
      for (std::ptrdiff_t i = 0; i < size; ++i) out[i] /= sum;
    }
  }
  return outs;
}

// Whether every row, and its last token as a decode step, has the bits by itself that it has among all.
bool alone_as_in_crowd(const AttentionForm& form, const Pool& pool, const Floats& q, const Floats& crowd) {
  const std::ptrdiff_t size = pool.shape.token_size();
  std::ptrdiff_t end = 0;
  bool good = true;
  for (const Row& row : kRows) {
    end += row.num_tokens;
    for (const std::ptrdiff_t n : {row.num_tokens, std::min<std::ptrdiff_t>(1, row.num_tokens)}) {
      const Row last{row.context + row.num_tokens - n, n, row.pages};
      const Floats out = run(form, pool, {last}, part(q, (end - n) * size, n * size));
      good = good && same_bits(out, part(crowd, (end - n) * size, n * size));
    }
  }
  return good;
}

void check(const AttentionForm& form, const Pool& pool, const Floats& q, const std::vector<double>& right,
           double bound) {
  set_num_threads(3);
  const Floats out = run(form, pool, kRows, q);
  CHECK(std::equal(out.begin(), out.end(), right.begin(), [&](float a, double b) { return near(a, b, bound); }));
  set_num_threads(1);
  CHECK(alone_as_in_crowd(form, pool, q, out));
}

TEST(attention_is_right_and_has_the_same_bits_alone_and_in_a_crowd) {
  for (const Shape& shape : kShapes) {
    const Floats q = values(80 * shape.token_size(), 3);
    for (KvStorage storage : kKvStorages) {
      const Pool pool(shape, storage);
      const std::vector<double> right = expected(pool, q);
      for (const AttentionForm* form : FORMS(kPortableAttention, kAvx2Attention)) check(*form, pool, q, right, 1e-5);
#if defined(__x86_64__)
      if (cpu_features().amx && storage != KvStorage::kFloat32) check(kAmxAttention, pool, q, right, 0.03);
#endif
    }
  }
}

}  // namespace
