// Scores to weights, sixteen query rows at a time: a lane is a row, a line is a key. See attention_bf16.h.
#pragma once

#include <limits>

#include "cpu/attention_bf16.h"
#include "cpu/avx512.h"

namespace antiphon::cpu::bf16 {

// 2^f on [0, 1), relative error 8.6e-5: a thirtieth of what rounding to bfloat16 does.
struct Exp2 {
  static constexpr float kC1 = 0.69511682f, kC2 = 0.22764498f, kC3 = 0.077067055f;
};

// 2^x in the lanes of `lanes`, 0 in the others. `one` is 1, or 1 and half a unit in the last place of bfloat16: cut off
// after 8 bits the result is then rounded.
template <bool kMasked>
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512 exp2_of(__m512 x, __m512 one, __mmask16 lanes) {
  const __m512 f = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(Exp2::kC3), f, _mm512_set1_ps(Exp2::kC2));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(Exp2::kC1));
  p = _mm512_fmadd_ps(p, f, one);
  return kMasked ? _mm512_maskz_scalef_ps(lanes, p, x) : _mm512_scalef_ps(p, x);
}

// The upper halves of two lines, interleaved: `even` in the lower halves.
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i upper_halves(__m512 even, __m512 odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                 _mm512_castps_si512(odd));
}

// After 64 keys: the sum of the weights (int8 alone), and the rows whose reference is too low to go on with.
struct Softened {
  __m512 sum;
  __mmask16 too_large;
};

// One tile's way from scores to weights, four keys at a time.
template <bool kInt8, bool kMasked>
class Softmax {
 public:
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE Softmax(const PackedBlock& block, const RowTile& tile, const float* scores,
                                               char* weights)
      : block_(block),
        scores_(scores),
        weights_(weights),
        reference_(_mm512_loadu_ps(tile.reference)),
        one_(_mm512_set1_ps(kInt8 ? 1.0f : 1.0f + 0x1p-8f)),
        seen_(kMasked ? _mm512_loadu_si512(tile.seen) : _mm512_setzero_si512()),
        largest_(_mm512_setzero_si512()),
        even_(_mm512_setzero_ps()),
        odd_(_mm512_setzero_ps()) {}

  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE void four_keys(std::ptrdiff_t first_key) {
    ANTIPHON_UNROLL(2)
    for (std::ptrdiff_t key = first_key; key < first_key + 4; key += 2) {
      const __m512 even = weight(key, even_);
      const __m512 odd = weight(key + 1, odd_);
      const __m512i pair = upper_halves(even, odd);
      if (!kInt8) largest_ = _mm512_max_epu16(largest_, pair);
      _mm512_storeu_si512(weights_ + key / 2 * kLineBytes, pair);
    }
  }

  // Too large are a weight over 2^32 or, with int8, a sum.
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE Softened end() const {
    const __m512 sum = _mm512_add_ps(even_, odd_);
    if (kInt8) return {sum, _mm512_cmp_ps_mask(sum, _mm512_set1_ps(0x1p32f), _CMP_GT_OQ)};
    const __m512i either = _mm512_max_epu16(_mm512_slli_epi32(largest_, 16), largest_);
    return {sum, _mm512_cmpgt_epu32_mask(either, _mm512_set1_epi32(0x4f80ffff))};  // 2^32, and whatever lies below
  }

 private:
  ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512 weight(std::ptrdiff_t key, __m512& sum) const {
    const __m512 score = _mm512_loadu_ps(scores_ + key * kTileRows);
    const __mmask16 lanes = kMasked ? _mm512_cmpgt_epi32_mask(seen_, _mm512_set1_epi32(static_cast<int>(key))) : 0;
    if (!kInt8) return exp2_of<kMasked>(_mm512_sub_ps(score, reference_), one_, lanes);
    const __m512 x = _mm512_fmsub_ps(score, _mm512_set1_ps(block_.k_scale[key]), reference_);
    const __m512 w = exp2_of<kMasked>(x, one_, lanes);
    sum = _mm512_add_ps(sum, w);
    const __m512 scale = _mm512_set1_ps(block_.v_scale[key]);
    const __m512 scaled = kMasked ? _mm512_maskz_mul_ps(lanes, w, scale) : _mm512_mul_ps(w, scale);
    // Half a unit of what is cut off: rounds. A NaN stays one, for the scales' payloads are empty (packed_scales).
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(scaled), _mm512_set1_epi32(0x8000)));
  }

  const PackedBlock& block_;
  const float* scores_;
  char* weights_;
  __m512 reference_, one_;
  __m512i seen_, largest_;
  __m512 even_, odd_;
};

// The largest score of the keys that each row sees. What is NaN is passed over.
template <bool kInt8>
ANTIPHON_AVX512_BF16 inline __m512 largest_score(const PackedBlock& block, const RowTile& tile, const float* scores) {
  const __m512i seen = _mm512_loadu_si512(tile.seen);
  __m512 most[2] = {_mm512_set1_ps(-std::numeric_limits<float>::infinity()),
                    _mm512_set1_ps(-std::numeric_limits<float>::infinity())};
  for (std::ptrdiff_t key = 0; key < kPageKeys; ++key) {
    __m512 score = _mm512_loadu_ps(scores + key * kTileRows);
    if (kInt8) score = _mm512_mul_ps(score, _mm512_set1_ps(block.k_scale[key]));
    const __mmask16 lanes = _mm512_cmpgt_epi32_mask(seen, _mm512_set1_epi32(static_cast<int>(key)));
    most[key % 2] = _mm512_mask_max_ps(most[key % 2], lanes, score, most[key % 2]);
  }
  return _mm512_max_ps(most[0], most[1]);
}

// Gives some lanes this block's largest score as their reference, and scales what was summed for them.
template <bool kInt8>
ANTIPHON_AVX512_BF16 __attribute__((noinline)) void move_reference(const PackedBlock& block, const RowTile& tile,
                                                                   const float* scores, __mmask16 lanes) {
  const __m512 before = _mm512_loadu_ps(tile.reference);
  const __m512 now = _mm512_mask_mov_ps(before, lanes, largest_score<kInt8>(block, tile, scores));
  _mm512_storeu_ps(tile.reference, now);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 factor = _mm512_mask_mov_ps(one, lanes, exp2_of<false>(_mm512_sub_ps(before, now), one, 0));
  for (std::ptrdiff_t dim = 0; dim < block.steps * kStepDims; ++dim) {
    float* line = tile.accumulator + dim * kTileRows;
    _mm512_storeu_ps(line, _mm512_mul_ps(_mm512_loadu_ps(line), factor));
  }
  _mm512_storeu_ps(tile.sum, _mm512_mul_ps(_mm512_loadu_ps(tile.sum), factor));
}

// A row that sees a key whose values are not finite becomes NaN.
ANTIPHON_AVX512_BF16 __attribute__((noinline)) inline void spoil(const PackedBlock& block, const RowTile& tile) {
  const __m512i first_bad = _mm512_set1_epi32(static_cast<int>(block.first_bad_key));
  const __mmask16 lanes = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(tile.seen), first_bad);
  const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
  _mm512_storeu_ps(tile.sum, _mm512_mask_mov_ps(_mm512_loadu_ps(tile.sum), lanes, nan));
}

// One tile's scores to weights.
template <bool kInt8, bool kMasked>
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE Softened soften_alone(const PackedBlock& block, const RowTile& tile,
                                                           const float* scores, char* weights) {
  Softmax<kInt8, kMasked> softmax(block, tile, scores, weights);
  for (std::ptrdiff_t key = 0; key < kPageKeys; key += 4) softmax.four_keys(key);
  return softmax.end();
}

}  // namespace antiphon::cpu::bf16
