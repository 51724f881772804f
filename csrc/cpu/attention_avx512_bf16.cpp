// Attention on AVX-512 BF16: see attention_bf16.h for the numbers. A lane is a query row: two elements of a key, or of
// a dim of the values, at a time are multiplied with all of them. Where a tile has at most 8 rows, as in decode steps of
// few heads, vectors of half the length are multiplied twice as often in the same time.
#if defined(__x86_64__)
#include "cpu/attention.h"
#include "cpu/attention_bf16_softmax.h"
#include "cpu/attention_bf16_work.h"

namespace antiphon::cpu {
namespace vectors {
namespace {

using bf16::kTileRows;
using bf16::PackedBlock;
using bf16::PagePrefetch;
using bf16::RowTile;
using bf16::Scratch;
using bf16::Unit;

constexpr int kLines = 16;                // sums at once
constexpr std::ptrdiff_t kPrefetches = 3;  // beside each kLines of them

ANTIPHON_INLINE std::int32_t pair_at(const char* at) {
  std::int32_t pair;
  std::memcpy(&pair, at, sizeof(pair));
  return pair;
}

// All rows of a tile, or the first half of them.
struct SixteenRows {
  using Sums = __m512;
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static Sums zero() { return _mm512_setzero_ps(); }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static Sums load(const float* from) { return _mm512_loadu_ps(from); }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static void store(float* to, Sums sums) { _mm512_storeu_ps(to, sums); }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static __m512 widened(Sums sums) { return sums; }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static __m512bh pairs(const char* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static Sums add(Sums sums, const char* pair, __m512bh rows) {
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair_at(pair)), rows);
  }
};

struct EightRows {
  using Sums = __m256;
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static Sums zero() { return _mm256_setzero_ps(); }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static Sums load(const float* from) { return _mm256_loadu_ps(from); }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static void store(float* to, Sums sums) { _mm256_storeu_ps(to, sums); }
  // With zeros for the rows that there are not: what a query of zeros would have.
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static __m512 widened(Sums sums) { return _mm512_zextps256_ps512(sums); }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static __m256bh pairs(const char* from) {
    return (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE static Sums add(Sums sums, const char* pair, __m256bh rows) {
    return _mm256_dpbf16_ps(sums, (__m256bh)_mm256_set1_epi32(pair_at(pair)), rows);
  }
};

// sums[line][row] += lines[line][pair] * pairs[pair][row], pairs ascending; the lines are line_bytes apart.
template <typename Rows>
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE void multiply(typename Rows::Sums (&sums)[kLines], const char* lines,
                                                   std::ptrdiff_t line_bytes, const char* pairs,
                                                   std::ptrdiff_t num_pairs) {
  for (std::ptrdiff_t pair = 0; pair < num_pairs; ++pair) {
    const auto rows = Rows::pairs(pairs + pair * bf16::kLineBytes);
    ANTIPHON_UNROLL(16)
    for (int line = 0; line < kLines; ++line) {
      sums[line] = Rows::add(sums[line], lines + line * line_bytes + pair * 4, rows);
    }
  }
}

// kSteps is 0, or the block's `steps`, so that the lines' addresses are constants apart.
template <typename Rows, std::ptrdiff_t kSteps>
ANTIPHON_AVX512_BF16 void score_steps(const Unit& unit, float* scores, PagePrefetch& prefetch) {
  const PackedBlock& block = *unit.block;
  const std::ptrdiff_t steps = kSteps > 0 ? kSteps : block.steps;
  const std::ptrdiff_t key_bytes = steps * bf16::kLineBytes;
  for (std::ptrdiff_t key = 0; key < kPageKeys; key += kLines) {
    for (std::ptrdiff_t i = 0; i < kPrefetches; ++i) prefetch.step();
    typename Rows::Sums sums[kLines];
    ANTIPHON_UNROLL(16)
    for (int line = 0; line < kLines; ++line) sums[line] = Rows::zero();
    multiply<Rows>(sums, block.keys + key * key_bytes, key_bytes, unit.tile.queries, steps * bf16::kStepDims / 2);
    ANTIPHON_UNROLL(16)
    for (int line = 0; line < kLines; ++line) {
      _mm512_storeu_ps(scores + (key + line) * kTileRows, Rows::widened(sums[line]));
    }
  }
}

template <typename Rows>
void score(const Unit& unit, float* scores, PagePrefetch& prefetch) {
  switch (unit.block->steps) {
    case 2: return score_steps<Rows, 2>(unit, scores, prefetch);
    case 4: return score_steps<Rows, 4>(unit, scores, prefetch);
    case 8: return score_steps<Rows, 8>(unit, scores, prefetch);
    default: return score_steps<Rows, 0>(unit, scores, prefetch);
  }
}

template <bool kInt8, bool kMasked>
ANTIPHON_AVX512_BF16 void soften(const Unit& unit, const float* scores, char* weights) {
  const PackedBlock& block = *unit.block;
  const RowTile& tile = unit.tile;
  if (block.first) {
    const __m512i seen = _mm512_loadu_si512(tile.seen);
    bf16::move_reference<kInt8>(block, tile, scores, _mm512_cmpgt_epi32_mask(seen, _mm512_setzero_si512()));
  }
  bf16::Softened done = bf16::soften_alone<kInt8, kMasked>(block, tile, scores, weights);
  if (done.too_large != 0) {
    bf16::move_reference<kInt8>(block, tile, scores, done.too_large);
    done = bf16::soften_alone<kInt8, kMasked>(block, tile, scores, weights);
  }
  if (kInt8) _mm512_storeu_ps(tile.sum, _mm512_add_ps(done.sum, _mm512_loadu_ps(tile.sum)));
}

// The sum of the weights, rounded as they are.
ANTIPHON_AVX512_BF16 void add_weights(const RowTile& tile, const char* weights) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_loadu_ps(tile.sum);
  for (std::ptrdiff_t pair = 0; pair < kPageKeys / 2; ++pair) {
    sum = _mm512_dpbf16_ps(sum, ones, (__m512bh)_mm512_loadu_si512(weights + pair * bf16::kLineBytes));
  }
  _mm512_storeu_ps(tile.sum, sum);
}

template <typename Rows>
ANTIPHON_AVX512_BF16 void add_values(const Unit& unit, const char* weights, PagePrefetch& prefetch) {
  const PackedBlock& block = *unit.block;
  const std::ptrdiff_t half = 2 * block.steps * bf16::kTileBytes;  // of the values: 32 keys
  for (std::ptrdiff_t tile = 0; tile < 2 * block.steps; ++tile) {
    for (std::ptrdiff_t i = 0; i < kPrefetches; ++i) prefetch.step();
    float* accumulator = unit.tile.accumulator + tile * kLines * kTileRows;
    const char* values = block.values + tile * bf16::kTileBytes;
    typename Rows::Sums sums[kLines];
    ANTIPHON_UNROLL(16)
    for (int line = 0; line < kLines; ++line) sums[line] = Rows::load(accumulator + line * kTileRows);
    multiply<Rows>(sums, values, bf16::kLineBytes, weights, bf16::kStepKeys / 2);
    multiply<Rows>(sums, values + half, bf16::kLineBytes, weights + bf16::kTileBytes, bf16::kStepKeys / 2);
    ANTIPHON_UNROLL(16)
    for (int line = 0; line < kLines; ++line) Rows::store(accumulator + line * kTileRows, sums[line]);
  }
}

struct Form {
  static void begin() {}
  static void end() {}
  static std::ptrdiff_t prefetches(std::ptrdiff_t steps) { return kPrefetches * (kPageKeys / kLines + 2 * steps); }

  template <bool kInt8>
  static void run_units(const Unit* units, std::ptrdiff_t num_units, const Scratch& scratch, PagePrefetch& prefetch) {
    float* scores = scratch.scores[0];
    char* weights = scratch.weights[0];
    for (const Unit* unit = units; unit < units + num_units; ++unit) {
      const bool few = unit->tile.num_rows <= kTileRows / 2;
      (few ? score<EightRows> : score<SixteenRows>)(*unit, scores, prefetch);
      unit->tile.masked ? soften<kInt8, true>(*unit, scores, weights) : soften<kInt8, false>(*unit, scores, weights);
      if (!kInt8) add_weights(unit->tile, weights);
      (few ? add_values<EightRows> : add_values<SixteenRows>)(*unit, weights, prefetch);
      if (!kInt8 && unit->block->first_bad_key < kPageKeys) bf16::spoil(*unit->block, unit->tile);
    }
  }
};

}  // namespace
}  // namespace vectors

const AttentionForm kAvx512Bf16Attention = {{}, {}, {}, bf16::run_item<vectors::Form>, {448, bf16::kTileRows}};

}  // namespace antiphon::cpu
#endif
