// Attention on emulated AMX tiles and AVX-512 BF16: bit for bit the order that attention_bf16.h promises, for any shape;
// and that what a query does not see, NaN and all, reaches it in no way. Built without ANTIPHON_EMULATED it holds a
// processor to the same, in the forms that it has.
#include <algorithm>
#include <utility>

#include "checks.h"
#include "cpu/attention.h"
#include "cpu/cpu_features.h"
#include "cpu/pool.h"
#include "elementary.h"
#include "tiles.h"

using namespace antiphon::cpu;
using checks::Floats;

namespace {

checks::Report report;
constexpr std::ptrdiff_t kPages = 16;

struct Form {
  const char* name;
  const AttentionForm& attention;
  bool chained;  // a step goes on from the sum before, pair by pair, the odd product first; else it is summed apart
};

struct Row {
  std::ptrdiff_t context, num_tokens;
  std::vector<std::int32_t> pages;
};

struct Case {
  const char* name;
  KvStorage storage;
  std::ptrdiff_t kv_heads, groups, head_dim;
  std::vector<Row> rows;
  float steepness = 1.0f;  // how much larger the keys of a block are than those of the block before
  std::ptrdiff_t num_tokens() const {
    std::ptrdiff_t sum = 0;
    for (const Row& row : rows) sum += row.num_tokens;
    return sum;
  }
  std::ptrdiff_t heads() const { return kv_heads * groups; }
};

float truncated(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits &= 0xffff0000u;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

float rounded_up(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits += 0x8000u;
  std::memcpy(&value, &bits, sizeof(bits));
  return truncated(value);
}

// One layer's cache. All that no row has filled is NaN, or for int8 a code of 99 with a scale that is NaN.
struct Cache {
  explicit Cache(const Case& of) : test(of), elements(of.kv_heads * kPages * kPageKeys * of.head_dim) {
    for (int half = 0; half < 2; ++half) {
      const bool int8 = test.storage == KvStorage::kInt8;
      stored[half].assign(static_cast<std::size_t>(elements * element_bytes(test.storage)), int8 ? 99 : '\xff');
      scales[half] = checks::poison(int8 ? elements / of.head_dim : 0);
      const Floats all = checks::random_floats(elements, 1 + half);
      for (const Row& row : test.rows) {
        for (std::ptrdiff_t i = 0; i < of.kv_heads * (row.context + row.num_tokens); ++i) {
          fill(half, slot(row, i / of.kv_heads, i % of.kv_heads), i / of.kv_heads / kPageKeys, all);
        }
      }
    }
  }

  std::ptrdiff_t slot(const Row& row, std::ptrdiff_t key, std::ptrdiff_t kv_head) const {
    return kv_head * kPages * kPageKeys + row.pages[static_cast<std::size_t>(key / kPageKeys)] * kPageKeys + key % kPageKeys;
  }

  void fill(int half, std::ptrdiff_t slot, std::ptrdiff_t block, const Floats& all) {
    const float grown = half == 0 ? std::pow(test.steepness, static_cast<float>(block)) : 1.0f;
    if (test.storage == KvStorage::kInt8) scales[half][slot] = grown * static_cast<float>(1 + slot % 5) / 64.0f;
    for (std::ptrdiff_t i = slot * test.head_dim; i < (slot + 1) * test.head_dim; ++i) {
      if (test.storage == KvStorage::kInt8) {
        stored[half][i] = static_cast<char>(std::nearbyint(std::fmax(-127.0f, std::fmin(127.0f, all[i] * 32.0f))));
      } else {
        put(half, i, emulated::to_bfloat16(all[i] * grown));
      }
    }
  }

  void put(int half, std::ptrdiff_t i, std::uint16_t bits) { std::memcpy(&stored[half][2 * i], &bits, sizeof(bits)); }

  float at(int half, std::ptrdiff_t slot, std::ptrdiff_t dim) const {
    const std::ptrdiff_t i = slot * test.head_dim + dim;
    if (test.storage == KvStorage::kInt8) return static_cast<float>(static_cast<signed char>(stored[half][i]));
    std::uint16_t bits;
    std::memcpy(&bits, &stored[half][2 * i], sizeof(bits));
    return emulated::from_bfloat16(bits);
  }

  KvLayer layer() {
    const bool int8 = test.storage == KvStorage::kInt8;
    return {stored[0].data(), stored[1].data(), int8 ? scales[0].data() : nullptr, int8 ? scales[1].data() : nullptr,
            test.storage, test.kv_heads, kPages * kPageKeys, test.head_dim};
  }

  const Case& test;
  std::ptrdiff_t elements;
  std::vector<char> stored[2];
  Floats scales[2];
};

// sum += the products of one step, whose even and odd k are summed apart, or as the form has it.
template <typename Left, typename Right>
void add_step(const Form& form, float& sum, std::ptrdiff_t num_k, const Left& left, const Right& right) {
  float parts[2] = {0.0f, 0.0f};
  if (form.chained) {
    for (std::ptrdiff_t k = 0; k < num_k; k += 2) {
      if (k + 1 < num_k) sum = emulated::flush(std::fmaf(left(k + 1), right(k + 1), emulated::flush(sum)));
      sum = emulated::flush(std::fmaf(left(k), right(k), emulated::flush(sum)));
    }
    return;
  }
  for (std::ptrdiff_t k = 0; k < num_k; ++k) parts[k % 2] = emulated::flush(std::fmaf(left(k), right(k), parts[k % 2]));
  sum = emulated::flush(emulated::flush(sum) + emulated::flush(parts[0] + parts[1]));
}

float exp2_promised(float x, float one) {
  if (std::isinf(x)) return x > 0 ? x : 0.0f;
  const float f = emulated::past_floor(x);
  const float p = std::fmaf(std::fmaf(std::fmaf(0.077067055f, f, 0.22764498f), f, 0.69511682f), f, one);
  return emulated::flush(std::ldexp(p, static_cast<int>(std::fmax(-1000.0f, std::fmin(1000.0f, std::floor(x))))));
}

// One query, in the promised order.
class Promised {
 public:
  Promised(const Form& form, const Cache& cache, const Row& row, std::ptrdiff_t kv_head, const float* q)
      : form_(form), cache_(cache), row_(row), kv_head_(kv_head), size_(cache.test.head_dim), int8_(cache.test.storage == KvStorage::kInt8),
        accumulator_(static_cast<std::size_t>(size_)) {
    const float scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(size_)));
    for (std::ptrdiff_t i = 0; i < size_; ++i) q_.push_back(emulated::from_bfloat16(emulated::to_bfloat16(q[i] * scale)));
  }

  Floats run(std::ptrdiff_t position) {
    for (std::ptrdiff_t first = 0; first <= position; first += kPageKeys) {
      run_block(first, std::min(kPageKeys, position - first + 1));
    }
    const float inverse = 1.0f / sum_;
    for (float& value : accumulator_) value = emulated::flush(value * inverse) + 0.0f;
    return accumulator_;
  }

  int num_moves() const { return num_moves_; }

 private:
  float scale(int half, std::ptrdiff_t slot) const { return cache_.scales[half][slot]; }

  void run_block(std::ptrdiff_t first, std::ptrdiff_t num_seen) {
    slots_.clear();
    scores_.clear();
    for (std::ptrdiff_t key = first; key < first + num_seen; ++key) {
      slots_.push_back(cache_.slot(row_, key, kv_head_));
      float score = 0.0f;
      for (std::ptrdiff_t dim = 0; dim < size_; dim += 32) {
        add_step(form_, score, std::min<std::ptrdiff_t>(32, size_ - dim),
                 [&](std::ptrdiff_t k) { return cache_.at(0, slots_.back(), dim + k); },
                 [&](std::ptrdiff_t k) { return q_[dim + k]; });
      }
      scores_.push_back(score);
    }
    if (first == 0) move();
    if (!soften()) {
      ++num_moves_;
      move();
      soften();
    }
    for (std::ptrdiff_t dim = -1; dim < size_; ++dim) {  // -1: the sum
      if (dim < 0 && int8_) continue;
      float& to = dim < 0 ? sum_ : accumulator_[dim];
      for (std::ptrdiff_t key = 0; key < num_seen; key += 32) {
        add_step(form_, to, std::min<std::ptrdiff_t>(32, num_seen - key),
                 [&](std::ptrdiff_t k) { return dim < 0 ? 1.0f : cache_.at(1, slots_[key + k], dim); },
                 [&](std::ptrdiff_t k) { return weights_[key + k]; });
      }
    }
    if (int8_) sum_ = block_sum_ + sum_;
  }

  // The block's largest score becomes the reference.
  void move() {
    float most = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < scores_.size(); ++i) {
      most = std::max(most, int8_ ? scores_[i] * scale(0, slots_[i]) : scores_[i]);
    }
    const float factor = exp2_promised(reference_ - most, 1.0f);
    reference_ = most;
    if (factor == 0.0f) {
      std::fill(accumulator_.begin(), accumulator_.end(), 0.0f);
      sum_ = 0.0f;
      return;
    }
    for (float& value : accumulator_) value = emulated::flush(value * factor);
    sum_ = emulated::flush(sum_ * factor);
  }

  // False where a weight, or with int8 their sum, is too large.
  bool soften() {
    weights_.clear();
    float sums[2] = {0.0f, 0.0f};
    bool good = true;
    for (std::size_t i = 0; i < scores_.size(); ++i) {
      if (int8_) {
        const float w = exp2_promised(std::fmaf(scores_[i], scale(0, slots_[i]), -reference_), 1.0f);
        sums[i % 2] += w;
        weights_.push_back(rounded_up(emulated::flush(w * scale(1, slots_[i]))));
      } else {
        weights_.push_back(truncated(exp2_promised(scores_[i] - reference_, 1.0f + 0x1p-8f)));
        good = good && weights_.back() <= 0x1p32f;
      }
    }
    block_sum_ = sums[0] + sums[1];
    return int8_ ? block_sum_ <= 0x1p32f : good;
  }

  const Form& form_;
  const Cache& cache_;
  const Row& row_;
  std::ptrdiff_t kv_head_, size_;
  bool int8_;
  Floats q_, accumulator_, scores_, weights_;
  std::vector<std::ptrdiff_t> slots_;
  float reference_ = -std::numeric_limits<float>::infinity(), sum_ = 0.0f, block_sum_ = 0.0f;
  int num_moves_ = 0;
};

Floats run(const Form& form, Cache& cache, const std::vector<Row>& rows, const Floats& q, std::ptrdiff_t item_rows) {
  std::vector<std::int32_t> tables;
  std::vector<std::int64_t> starts{0}, contexts;
  for (const Row& row : rows) {
    tables.insert(tables.end(), row.pages.begin(), row.pages.end());
    tables.resize(8 * (contexts.size() + 1), -1);
    starts.push_back(starts.back() + row.num_tokens);
    contexts.push_back(row.context);
  }
  const AttentionPlan plan(tables.data(), 8, starts.data(), contexts.data(), static_cast<std::ptrdiff_t>(rows.size()),
                           kPages, cache.test.groups, cache.test.kv_heads, num_threads(),
                           {item_rows, form.attention.cut.tile_rows});
  Floats out = checks::poison(static_cast<std::ptrdiff_t>(q.size()));
  paged_attention(form.attention, plan, cache.layer(), q.data(), out.data());
  return out;
}

Floats promised(const Form& form, const Cache& cache, const Floats& q, int& num_moves) {
  Floats out;
  const float* next = q.data();
  for (const Row& row : cache.test.rows) {
    for (std::ptrdiff_t i = 0; i < row.num_tokens * cache.test.heads(); ++i, next += cache.test.head_dim) {
      Promised one(form, cache, row, i % cache.test.heads() / cache.test.groups, next);
      const Floats result = one.run(row.context + i / cache.test.heads());
      out.insert(out.end(), result.begin(), result.end());
      num_moves += one.num_moves();
    }
  }
  return out;
}

void check_case(const Form& form, const Case& test) {
  Cache cache(test);
  const std::ptrdiff_t token = test.heads() * test.head_dim;
  const Floats q = checks::random_floats(test.num_tokens() * token, 9);
  int num_moves = 0;
  const Floats expected = promised(form, cache, q, num_moves);
  for (const std::ptrdiff_t item_rows : {16, 48, 448}) {
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      report.expect_equal(run(form, cache, test.rows, q, item_rows), expected, std::string(form.name) + " " + test.name);
    }
  }
  set_num_threads(1);
  report.expect(test.steepness == 1.0f || num_moves > 0, std::string(test.name) + " moves a reference");
  std::ptrdiff_t first = 0;
  for (const Row& row : test.rows) {  // every token as a decode step of its own
    for (std::ptrdiff_t i = 0; i < row.num_tokens; ++i, first += token) {
      const Row alone{row.context + i, 1, row.pages};
      report.expect_equal(run(form, cache, {alone}, Floats(q.begin() + first, q.begin() + first + token), 448),
                          Floats(expected.begin() + first, expected.begin() + first + token),
                          std::string(form.name) + " " + test.name);
    }
  }
}

// A value that is not finite makes NaN of all that see it, and of nothing else.
void check_bad_value(const Form& form) {
  const Case test{"bad value", KvStorage::kBfloat16, 1, 3, 64, {{0, 70, {3, 1}}}};
  Cache cache(test);
  const Floats q = checks::random_floats(test.num_tokens() * 192, 9);
  const Floats good = run(form, cache, test.rows, q, 448);
  for (const std::ptrdiff_t position : {0, 5, 63, 64, 69}) {
    for (const std::uint16_t bits : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
      Cache bad(test);
      bad.put(1, bad.slot(test.rows[0], position, 0) * 64 + 17, bits);
      Floats expected = good;
      std::fill(expected.begin() + position * 192, expected.end(), std::numeric_limits<float>::quiet_NaN());
      report.expect_equal(run(form, bad, test.rows, q, 448), expected, "bad value");
    }
  }
}

// Negative control: the same keys in another order have other bits.
void check_control(const Form& form) {
  const Case test{"control", KvStorage::kBfloat16, 1, 1, 64, {{63, 1, {0}}}};
  Cache cache(test), turned(test);
  const Floats q = checks::random_floats(64, 9);
  for (auto& half : turned.stored) {
    for (std::ptrdiff_t key = 0; key < 32; ++key) {
      std::swap_ranges(&half[key * 128], &half[key * 128] + 128, &half[(63 - key) * 128]);
    }
  }
  report.expect(run(form, cache, test.rows, q, 448) != run(form, turned, test.rows, q, 448), "another order has other bits");
}

void check_form(const Form& form) {
  const std::vector<Row> mixed = {{0, 1, {6}},
                                  {130, 40, {0, 1, 2, 5}},
                                  {0, 0, {}},
                                  {169, 1, {0, 1, 2, 7}},
                                  {61, 5, {4, 9}},
                                  {128, 1, {0, 1, 8}},
                                  {0, 64, {10}}};
  const std::vector<Row> few = {{60, 9, {2, 7}}, {127, 1, {0, 1}}};
  const std::vector<Row> one = {{0, 65, {11, 3}}};
  for (const KvStorage storage : {KvStorage::kBfloat16, KvStorage::kInt8}) {
    const bool int8 = storage == KvStorage::kInt8;
    check_case(form, {int8 ? "int8 mixed" : "bf16 mixed", storage, 2, 7, 64, mixed});
    check_case(form, {int8 ? "int8 steep" : "bf16 steep", storage, 1, 2, 64, mixed, 8.0f});
    check_case(form, {int8 ? "int8 64" : "bf16 64", storage, 1, 1, 64, one});
    for (const std::ptrdiff_t head_dim : {5, 16, 32, 48, 96, 128, 160, 256}) {
      check_case(form, {int8 ? "int8 sizes" : "bf16 sizes", storage, 1, 5, head_dim, few});
      check_case(form, {int8 ? "int8 sizes, steep" : "bf16 sizes, steep", storage, 2, 8, head_dim, few, 40.0f});
    }
  }
  check_bad_value(form);
  check_control(form);
}

}  // namespace

int main() {
  const CpuFeatures& features = cpu_features();  // on a processor that has them, asks for the tiles
#if defined(ANTIPHON_EMULATED)
  const bool emulated = true;
#else
  const bool emulated = false;
#endif
  if (emulated || features.amx) check_form({"amx", kAmxAttention, false});
  if (emulated || features.avx512_bf16) check_form({"avx512_bf16", kAvx512Bf16Attention, true});
  return report.finish("bf16_attention");
}
