// Pages and queries to the layouts of attention_bf16.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/attention_bf16.h"
#include "cpu/avx512.h"
#include "cpu/rounding.h"
#include "cpu/transpose_words.h"

namespace antiphon::cpu::bf16 {

// Pages that will be read next, fetched to the second-level cache a little at a time.
class PagePrefetch {
 public:
  static constexpr std::ptrdiff_t kMostPages = 16;  // a block has two, of keys and of values

  void add(const char* page) { pages_[num_pages_++] = page; }

  // From now on; each call of step() fetches its share.
  void start(std::ptrdiff_t page_bytes, std::ptrdiff_t num_calls) {
    page_bytes_ = round_up(page_bytes, kBurstBytes);
    bursts_per_step_ = ceil_div(num_pages_ * page_bytes_ / kBurstBytes, num_calls);
  }

  ANTIPHON_INLINE void step() {
    for (std::ptrdiff_t i = 0; i < bursts_per_step_; ++i) {
      if (at_ == end_) {
        if (next_page_ == num_pages_) return;
        at_ = pages_[next_page_++];
        end_ = at_ + page_bytes_;
      }
      __builtin_prefetch(at_, 0, 2);
      __builtin_prefetch(at_ + kLineBytes, 0, 2);
      __builtin_prefetch(at_ + 2 * kLineBytes, 0, 2);
      __builtin_prefetch(at_ + 3 * kLineBytes, 0, 2);
      at_ += kBurstBytes;
    }
  }

 private:
  static constexpr std::ptrdiff_t kBurstBytes = 4 * kLineBytes;
  const char* pages_[kMostPages];
  std::ptrdiff_t num_pages_ = 0, next_page_ = 0, page_bytes_ = 0, bursts_per_step_ = 0;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

// A row of 32 dims or fewer of float32, scaled, as bfloat16; zeros after it.
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i query_line(const float* q, std::ptrdiff_t num_dims, __m512 scale) {
  const __m512 low = _mm512_maskz_loadu_ps(first_lanes(num_dims), q);
  const __m512 high = _mm512_maskz_loadu_ps(first_lanes(num_dims - 16), q + std::min<std::ptrdiff_t>(16, num_dims));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, scale), _mm512_mul_ps(low, scale));
}

// `rows` queries of head_dim to a tile's queries.
ANTIPHON_AVX512_BF16 inline void pack_queries(const float* const* rows, std::ptrdiff_t num_rows,
                                              std::ptrdiff_t head_dim, float scale, char* packed) {
  const __m512 scales = _mm512_set1_ps(scale);
  for (std::ptrdiff_t dim = 0; dim < head_dim; dim += kStepDims) {
    __m512i lines[16];
    for (std::ptrdiff_t row = 0; row < kTileRows; ++row) {
      lines[row] = row < num_rows ? query_line(rows[row] + dim, head_dim - dim, scales) : _mm512_setzero_si512();
    }
    transpose_words(lines);
    for (int i = 0; i < 16; ++i, packed += kLineBytes) _mm512_storeu_si512(packed, lines[i]);
  }
}

ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m128i load_sixteen(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i widened(__m128i low, __m128i high) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)),
                                      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)));
}

// 32 elements of a stored key as bfloat16, or the first `num_dims` of them.
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i widened(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i widened(const std::int8_t* from) {
  return widened(load_sixteen(from), load_sixteen(from + 16));
}
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i widened(const std::uint16_t* from, std::ptrdiff_t num_dims) {
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << num_dims) - 1), from);
}
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i widened(const std::int8_t* from, std::ptrdiff_t num_dims) {
  return widened(_mm_maskz_loadu_epi8(first_lanes(num_dims), from),
                 _mm_maskz_loadu_epi8(first_lanes(num_dims - 16), from + std::min<std::ptrdiff_t>(16, num_dims)));
}

// num_keys lines of a page as bfloat16 [64][32 steps], with zeros beside and below them.
template <typename T>
ANTIPHON_AVX512_BF16 void widen_page(const void* page, std::ptrdiff_t num_keys, std::ptrdiff_t head_dim, char* lines) {
  const T* from = static_cast<const T*>(page);
  for (std::ptrdiff_t key = 0; key < num_keys; ++key, from += head_dim) {
    std::ptrdiff_t dim = 0;
    for (; dim + kStepDims <= head_dim; dim += kStepDims, lines += kLineBytes) {
      _mm512_storeu_si512(lines, widened(from + dim));
    }
    if (dim == head_dim) continue;
    _mm512_storeu_si512(lines, widened(from + dim, head_dim - dim));
    lines += kLineBytes;
  }
  const std::ptrdiff_t line_bytes = ceil_div(head_dim, kStepDims) * kLineBytes;
  std::memset(lines, 0, static_cast<std::size_t>((kPageKeys - num_keys) * line_bytes));
}

// Eight dims of 32 keys, `key_bytes` apart, to eight lines of 32 keys: an 8 x 8 transpose in each quarter.
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE void transpose_eight_dims(const char* from, std::ptrdiff_t key_bytes,
                                                               char* packed) {
  __m512i r[8], t[8];
  ANTIPHON_UNROLL(8)
  for (int i = 0; i < 8; ++i) {  // keys i, 8 + i, 16 + i, 24 + i
    const char* key = from + i * key_bytes;
    r[i] = _mm512_castsi128_si512(load_sixteen(key));
    r[i] = _mm512_inserti32x4(r[i], load_sixteen(key + 8 * key_bytes), 1);
    r[i] = _mm512_inserti32x4(r[i], load_sixteen(key + 16 * key_bytes), 2);
    r[i] = _mm512_inserti32x4(r[i], load_sixteen(key + 24 * key_bytes), 3);
  }
  ANTIPHON_UNROLL(4)
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
    t[4 + i] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
  ANTIPHON_UNROLL(4)
  // Two dims of four keys each: r[0, 2] dims 0 and 1, r[1, 3] 2 and 3, r[4, 6] 4 and 5
  for (int i = 0; i < 8; i += 2) {
    r[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    r[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  ANTIPHON_UNROLL(4)
  for (int i = 0; i < 4; ++i) {
    const int at = i / 2 * 4 + i % 2;  // dims 2i and 2i + 1
    _mm512_storeu_si512(packed + 2 * i * kLineBytes, _mm512_unpacklo_epi64(r[at], r[at + 2]));
    _mm512_storeu_si512(packed + (2 * i + 1) * kLineBytes, _mm512_unpackhi_epi64(r[at], r[at + 2]));
  }
}

// Lines of bfloat16 [64][32 steps] to PackedBlock's values. kSteps is 0, or `steps`, so that addresses are constants.
template <std::ptrdiff_t kSteps>
ANTIPHON_AVX512_BF16 void pack_values_of(const char* lines, std::ptrdiff_t any_steps, char* packed,
                                         PagePrefetch& prefetch) {
  const std::ptrdiff_t steps = kSteps > 0 ? kSteps : any_steps;
  const std::ptrdiff_t key_bytes = steps * kLineBytes;
  for (std::ptrdiff_t key = 0; key < kPageKeys; key += kStepKeys) {
    for (std::ptrdiff_t eight = 0; eight < 4 * steps; ++eight, packed += 8 * kLineBytes) {
      transpose_eight_dims(lines + key * key_bytes + eight * 16, key_bytes, packed);
      prefetch.step();
    }
  }
}

ANTIPHON_AVX512_BF16 inline void pack_values(const char* lines, std::ptrdiff_t steps, char* packed,
                                             PagePrefetch& prefetch) {
  switch (steps) {
    case 2: return pack_values_of<2>(lines, steps, packed, prefetch);
    case 4: return pack_values_of<4>(lines, steps, packed, prefetch);
    case 8: return pack_values_of<8>(lines, steps, packed, prefetch);
    default: return pack_values_of<0>(lines, steps, packed, prefetch);
  }
}

// num_keys scales, with one NaN for all, and zeros after them.
ANTIPHON_AVX512_BF16 inline void pack_scales(const float* scales, std::ptrdiff_t num_keys, float* packed) {
  for (std::ptrdiff_t key = 0; key < kPageKeys; key += 16) {
    const __mmask16 lanes = first_lanes(num_keys - key);
    const __m512 scale = _mm512_maskz_loadu_ps(lanes, scales + std::min(key, num_keys));
    const __mmask16 nan = _mm512_cmp_ps_mask(scale, scale, _CMP_UNORD_Q);
    const __m512 empty_nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    _mm512_storeu_ps(packed + key, _mm512_mask_mov_ps(scale, nan, empty_nan));
  }
}

// Which of 32 bfloat16, shifted left by one so that the sign is gone, are not finite.
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __mmask32 not_finite(__m512i magnitudes) {
  return _mm512_cmpgt_epu16_mask(magnitudes, _mm512_set1_epi32(static_cast<int>(0xfefffeffu)));
}

// Whether 64 lines of bfloat16 are finite.
ANTIPHON_AVX512_BF16 inline bool all_finite(const char* lines, std::ptrdiff_t num_bytes) {
  __m512i most[4] = {};
  for (std::ptrdiff_t i = 0; i < num_bytes; i += 4 * kLineBytes) {
    ANTIPHON_UNROLL(4)
    for (int j = 0; j < 4; ++j) {
      const __m512i line = _mm512_loadu_si512(lines + i + j * kLineBytes);
      most[j] = _mm512_max_epu16(most[j], _mm512_add_epi16(line, line));  // without the sign
    }
  }
  most[0] = _mm512_max_epu16(_mm512_max_epu16(most[0], most[1]), _mm512_max_epu16(most[2], most[3]));
  return not_finite(most[0]) == 0;
}

// The first of 64 lines of bfloat16 that is not finite. Every such line becomes zeros.
ANTIPHON_AVX512_BF16 inline std::ptrdiff_t clear_bad_lines(std::ptrdiff_t line_bytes, char* lines) {
  std::ptrdiff_t first = kPageKeys;
  for (std::ptrdiff_t key = kPageKeys - 1; key >= 0; --key) {
    bool finite = true;
    for (std::ptrdiff_t i = 0; i < line_bytes; i += kLineBytes) {
      const __m512i words = _mm512_loadu_si512(lines + key * line_bytes + i);
      finite = finite && not_finite(_mm512_add_epi16(words, words)) == 0;
    }
    if (finite) continue;
    first = key;
    std::memset(lines + key * line_bytes, 0, static_cast<std::size_t>(line_bytes));
  }
  return first;
}

// Sixteen rows' results: [dims][16 rows], times each row's inverse, to rows of `out`.
ANTIPHON_AVX512_BF16 inline void store_rows(const RowTile& tile, std::ptrdiff_t num_rows, std::ptrdiff_t head_dim,
                                            float* const* rows) {
  const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(tile.sum));
  for (std::ptrdiff_t dim = 0; dim < head_dim; dim += 16) {
    __m512i lines[16];
    for (int i = 0; i < 16; ++i) {
      const __m512 line = _mm512_mul_ps(_mm512_loadu_ps(tile.accumulator + (dim + i) * kTileRows), inverse);
      lines[i] = _mm512_castps_si512(_mm512_add_ps(line, _mm512_setzero_ps()));  // -0 + 0 is 0
    }
    transpose_words(lines);
    for (std::ptrdiff_t row = 0; row < num_rows; ++row) {
      _mm512_mask_storeu_ps(rows[row] + dim, first_lanes(head_dim - dim), _mm512_castsi512_ps(lines[row]));
    }
  }
}

}  // namespace antiphon::cpu::bf16
