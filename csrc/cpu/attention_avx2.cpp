// AVX2 + FMA attention: a tile's scores and sums stay in registers over a whole chain.
#if defined(__x86_64__)
#include <algorithm>
#include <limits>

#include "cpu/attention.h"
#include "cpu/avx2.h"

namespace antiphon::cpu {
namespace {

// Panels taken at once, so that there are 8 chains or more to fill two units of 4 cycles' latency.
template <int kRows>
constexpr int kPanelsAtOnce = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;

// Bytes to be prefetched into the second-level cache, a little at a time: a burst would wait for memory.
struct Prefetch {
  const char* next;
  const char* end;

  void step() {
    if (next >= end) return;
    _mm_prefetch(next, _MM_HINT_T1);
    _mm_prefetch(next + 64, _MM_HINT_T1);
    next += 128;
  }
};

// sums[row] += a[row][k] * b[panel][k][16] over ascending k: one chain for each element.
template <int kRows, int kPanels>
ANTIPHON_AVX2_INLINE void chain(__m256 (&sums)[kRows][2 * kPanels], const float* a, std::ptrdiff_t a_row_stride,
                           const float* b, std::ptrdiff_t b_panel_stride, std::ptrdiff_t num_k,
                           Prefetch& prefetch) {
  const auto step = [&](std::ptrdiff_t k) ANTIPHON_AVX2 __attribute__((always_inline)) {
    if constexpr (kPanels == 1) {
      const __m256 low = _mm256_load_ps(b + k * kPanel);
      const __m256 high = _mm256_load_ps(b + k * kPanel + 8);
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256 x = _mm256_broadcast_ss(a + row * a_row_stride + k);
        multiply_add(sums[row][0], x, low);
        multiply_add(sums[row][1], x, high);
      }
    } else {
      __m256 x[kRows];
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) x[row] = _mm256_broadcast_ss(a + row * a_row_stride + k);
#pragma GCC unroll 8
      for (int part = 0; part < 2 * kPanels; ++part) {
        const __m256 line = _mm256_load_ps(b + part / 2 * b_panel_stride + k * kPanel + part % 2 * 8);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) multiply_add(sums[row][part], x[row], line);
      }
    }
  };
  std::ptrdiff_t k = 0;
  for (; k + 4 <= num_k; k += 4) {
    prefetch.step();
    step(k);
    step(k + 1);
    step(k + 2);
    step(k + 3);
  }
  for (; k < num_k; ++k) step(k);
}

// scores[row][64] of kPanels panels of keys from `panel` on.
template <int kRows, int kPanels>
ANTIPHON_AVX2_INLINE void score_panels(const AttentionTile& tile, std::ptrdiff_t panel, float* scores,
                                  Prefetch& prefetch) {
  __m256 sums[kRows][2 * kPanels];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < 2 * kPanels; ++part) sums[row][part] = _mm256_setzero_ps();
  }
  const std::ptrdiff_t panel_stride = tile.head_dim * kPanel;
  chain<kRows, kPanels>(sums, tile.q, tile.head_dim, tile.keys + panel * panel_stride, panel_stride, tile.head_dim,
                        prefetch);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < 2 * kPanels; ++part) {
      _mm256_store_ps(scores + row * kPageKeys + panel * kPanel + part * 8, sums[row][part]);
    }
  }
}

// 2^x for x <= 0 within 1 unit in the last place, 0 below -126; NaN stays NaN. Relative error of the polynomial on
// [-1/2, 1/2]: 1.6e-8.
ANTIPHON_AVX2_INLINE __m256 exp2_of_negative(__m256 x) {
  const __m256 magic = _mm256_set1_ps(0x1.8p23f);  // adding it rounds to an integer, which its low bits then hold
  const __m256 shifted = _mm256_add_ps(x, magic);
  const __m256 f = _mm256_sub_ps(x, _mm256_sub_ps(shifted, magic));
  __m256 p = _mm256_set1_ps(0.00015353361959569156f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.0013398875016719103f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.00961843691766262f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.055503323674201965f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.24022647738456726f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.6931471824645996f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  const __m256 kept = _mm256_and_ps(scaled, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_GE_OQ));
  return _mm256_or_ps(kept, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));  // all bits set is a NaN
}

ANTIPHON_AVX2_INLINE float lane_max(__m256 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

ANTIPHON_AVX2_INLINE float lane_sum(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// scores[64] of one row become its weights; returns the correction of what was summed so far. kSeen is 64, or 0 when
// num_seen is to be looked at.
template <int kSeen>
ANTIPHON_AVX2_INLINE float soften(const AttentionTile& tile, int row, std::ptrdiff_t num_seen, float* scores) {
  const std::ptrdiff_t seen = kSeen > 0 ? kSeen : num_seen;
  const __m256 nothing = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto mask = [&](std::ptrdiff_t key) ANTIPHON_AVX2 __attribute__((always_inline)) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(seen - key)), lanes);
  };
  __m256 most = nothing;
  for (std::ptrdiff_t key = 0; key < seen; key += 8) {
    __m256 score = _mm256_load_ps(scores + key);
    if (tile.k_scale != nullptr) {
      const float* scale = tile.k_scale + key;
      score = _mm256_mul_ps(score, kSeen > 0 ? _mm256_loadu_ps(scale) : _mm256_maskload_ps(scale, mask(key)));
    }
    if (kSeen == 0) score = _mm256_blendv_ps(nothing, score, _mm256_castsi256_ps(mask(key)));
    if (kSeen == 0 || tile.k_scale != nullptr) _mm256_store_ps(scores + key, score);
    most = _mm256_max_ps(most, score);
  }
  const float before = tile.max[row];
  const float now = std::max(before, lane_max(most));
  const __m256 subtracted = _mm256_set1_ps(now);
  __m256 sum = _mm256_setzero_ps();
  for (std::ptrdiff_t key = 0; key < seen; key += 8) {
    __m256 weight = exp2_of_negative(_mm256_sub_ps(_mm256_load_ps(scores + key), subtracted));
    sum = _mm256_add_ps(sum, weight);
    if (tile.v_scale != nullptr) {
      const float* scale = tile.v_scale + key;
      weight = _mm256_mul_ps(weight, kSeen > 0 ? _mm256_loadu_ps(scale) : _mm256_maskload_ps(scale, mask(key)));
    }
    _mm256_store_ps(scores + key, weight);
  }
  const float correction = _mm256_cvtss_f32(exp2_of_negative(_mm256_set1_ps(before - now)));
  tile.max[row] = now;
  tile.sum[row] = correction * tile.sum[row] + lane_sum(sum);
  return correction;
}

// accumulator = correction * accumulator + weights * values over keys [first, end), for kPanels panels of columns.
template <int kRows, int kPanels>
ANTIPHON_AVX2_INLINE void add_values(const AttentionTile& tile, std::ptrdiff_t panel, std::ptrdiff_t row_stride,
                                int first_row, const float* weights, const float* corrections, std::ptrdiff_t first,
                                std::ptrdiff_t end, Prefetch& prefetch) {
  const std::ptrdiff_t panel_stride = tile.num_keys * kPanel;
  float* accumulator = tile.accumulator + first_row * row_stride + panel * kPanel;
  __m256 sums[kRows][2 * kPanels];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const __m256 correction = _mm256_broadcast_ss(corrections + row);
#pragma GCC unroll 8
    for (int part = 0; part < 2 * kPanels; ++part) {
      sums[row][part] = _mm256_mul_ps(correction, _mm256_load_ps(accumulator + row * row_stride + part * 8));
    }
  }
  chain<kRows, kPanels>(sums, weights + first_row * kPageKeys + first, kPageKeys,
                        tile.values + panel * panel_stride + first * kPanel, panel_stride, end - first,
                        prefetch);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int part = 0; part < 2 * kPanels; ++part) {
      _mm256_store_ps(accumulator + row * row_stride + part * 8, sums[row][part]);
    }
  }
}

template <int kRows>
ANTIPHON_AVX2_INLINE void add_all_values(const AttentionTile& tile, int first_row, const float* weights,
                                    const float* corrections, std::ptrdiff_t first, std::ptrdiff_t end,
                                    Prefetch& prefetch) {
  constexpr int kPanels = kPanelsAtOnce<kRows>;
  const std::ptrdiff_t num_panels = (tile.head_dim + kPanel - 1) / kPanel;
  std::ptrdiff_t panel = 0;
  for (; panel + kPanels <= num_panels; panel += kPanels) {
    add_values<kRows, kPanels>(tile, panel, num_panels * kPanel, first_row, weights, corrections, first, end,
                               prefetch);
  }
  for (; kPanels > 1 && panel < num_panels; ++panel) {
    add_values<kRows, 1>(tile, panel, num_panels * kPanel, first_row, weights, corrections, first, end, prefetch);
  }
}

// One row's last keys, those that not all rows of its tile see: not inlined, since every tile has them.
ANTIPHON_AVX2 __attribute__((noinline)) void add_last_values(const AttentionTile& tile, int row, const float* weights,
                                                             std::ptrdiff_t first, std::ptrdiff_t end) {
  const float unchanged = 1.0f;
  Prefetch nothing{};
  add_all_values<1>(tile, row, weights, &unchanged, first, end, nothing);
}

template <int kRows>
ANTIPHON_AVX2 void run_tile(const AttentionTile& tile) {
  alignas(32) float scores[kRows * kPageKeys];
  float corrections[kRows];
  std::ptrdiff_t fewest = kPageKeys;
  std::ptrdiff_t most = 0;
  for (int row = 0; row < kRows; ++row) {
    fewest = std::min<std::ptrdiff_t>(fewest, tile.num_seen[row]);
    most = std::max<std::ptrdiff_t>(most, tile.num_seen[row]);
  }
  constexpr int kPanels = kPanelsAtOnce<kRows>;
  const std::ptrdiff_t num_panels = (most + kPanel - 1) / kPanel;
  Prefetch keys{tile.next_keys, tile.next_keys + tile.next_bytes};
  Prefetch values{tile.next_values, tile.next_values + tile.next_bytes};
  std::ptrdiff_t panel = 0;
  for (; panel + kPanels <= num_panels; panel += kPanels) score_panels<kRows, kPanels>(tile, panel, scores, keys);
  for (; kPanels > 1 && panel < num_panels; ++panel) score_panels<kRows, 1>(tile, panel, scores, keys);
  while (keys.next < keys.end) keys.step();
  for (int row = 0; row < kRows; ++row) {
    float* row_scores = scores + row * kPageKeys;
    corrections[row] = tile.num_seen[row] == kPageKeys
                           ? soften<kPageKeys>(tile, row, kPageKeys, row_scores)
                           : soften<0>(tile, row, tile.num_seen[row], row_scores);
  }
  add_all_values<kRows>(tile, 0, scores, corrections, 0, fewest, values);
  while (values.next < values.end) values.step();
  for (int row = 0; row < kRows; ++row) {
    if (tile.num_seen[row] > fewest) add_last_values(tile, row, scores, fewest, tile.num_seen[row]);
  }
}

float widen_one(float value) { return value; }
float widen_one(std::int8_t value) { return static_cast<float>(value); }
float widen_one(std::uint16_t value) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(value) << 16); }

ANTIPHON_AVX2_INLINE __m256 widen_eight(const float* from) { return _mm256_loadu_ps(from); }
ANTIPHON_AVX2_INLINE __m256 widen_eight(const std::uint16_t* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
ANTIPHON_AVX2_INLINE __m256 widen_eight(const std::int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

// Keys 0-7 of `rows`, elements 0-7, to packed[element][0..7] of lines of 16.
ANTIPHON_AVX2_INLINE void transpose_eight(const float* const* rows, std::ptrdiff_t element, float* packed) {
  __m256 r[8], pairs[8], quads[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows[i] + element);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    quads[4 * i] = _mm256_shuffle_ps(pairs[4 * i], pairs[4 * i + 2], 0x44);
    quads[4 * i + 1] = _mm256_shuffle_ps(pairs[4 * i], pairs[4 * i + 2], 0xee);
    quads[4 * i + 2] = _mm256_shuffle_ps(pairs[4 * i + 1], pairs[4 * i + 3], 0x44);
    quads[4 * i + 3] = _mm256_shuffle_ps(pairs[4 * i + 1], pairs[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_store_ps(packed + (element + i) * kPanel, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    _mm256_store_ps(packed + (element + i + 4) * kPanel, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}

ANTIPHON_AVX2_INLINE void transpose_panel(const float* const* rows, std::ptrdiff_t element, float* packed) {
  transpose_eight(rows, element, packed);
  transpose_eight(rows + 8, element, packed + 8);
}

// Sixteen bits of a key's element, in place: bfloat16 bits, or an int8 widened.
ANTIPHON_AVX2_INLINE __m128i load_sixteens(const std::uint16_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
ANTIPHON_AVX2_INLINE __m128i load_sixteens(const std::int8_t* from) {
  return _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

// Eight of them as the upper halves of eight 32-bit words, to float32.
ANTIPHON_AVX2_INLINE __m256 widen_upper(__m256i words, const std::uint16_t*) { return _mm256_castsi256_ps(words); }
ANTIPHON_AVX2_INLINE __m256 widen_upper(__m256i words, const std::int8_t*) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16));
}

// 16 keys x 8 elements, transposed while they are narrow. The lanes hold keys 0-3, 8-11 and 4-7, 12-15, so that
// unpacking a lane's low and high halves against zeros yields keys 0-7 and 8-15 in order.
template <typename T>
ANTIPHON_AVX2_INLINE void transpose_panel(const T* const* rows, std::ptrdiff_t element, float* packed) {
  __m256i r[8], pairs[8], quads[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int key = i < 4 ? i : i + 4;
    r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_sixteens(rows[key] + element)),
                                   load_sixteens(rows[key + 4] + element), 1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    quads[4 * i] = _mm256_unpacklo_epi32(pairs[4 * i], pairs[4 * i + 2]);
    quads[4 * i + 1] = _mm256_unpackhi_epi32(pairs[4 * i], pairs[4 * i + 2]);
    quads[4 * i + 2] = _mm256_unpacklo_epi32(pairs[4 * i + 1], pairs[4 * i + 3]);
    quads[4 * i + 3] = _mm256_unpackhi_epi32(pairs[4 * i + 1], pairs[4 * i + 3]);
  }
  const __m256i zero = _mm256_setzero_si256();
  const auto store = [&](std::ptrdiff_t i, __m256i line) ANTIPHON_AVX2 __attribute__((always_inline)) {
    float* to = packed + (element + i) * kPanel;
    _mm256_store_ps(to, widen_upper(_mm256_unpacklo_epi16(zero, line), rows[0]));
    _mm256_store_ps(to + 8, widen_upper(_mm256_unpackhi_epi16(zero, line), rows[0]));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store(2 * i, _mm256_unpacklo_epi64(quads[i], quads[i + 4]));
    store(2 * i + 1, _mm256_unpackhi_epi64(quads[i], quads[i + 4]));
  }
}

template <typename T>
ANTIPHON_AVX2 void pack_keys(const void* page, std::ptrdiff_t num_keys, std::ptrdiff_t head_dim, float* packed) {
  const T* from = static_cast<const T*>(page);
  for (std::ptrdiff_t first = 0; first < num_keys; first += kPanel) {
    const T* rows[kPanel];
    for (std::ptrdiff_t i = 0; i < kPanel; ++i) {
      rows[i] = from + std::min(first + i, num_keys - 1) * head_dim;  // past the end any key will do: it is masked
    }
    std::ptrdiff_t element = 0;
    for (; element + 8 <= head_dim; element += 8) transpose_panel(rows, element, packed);
    for (; element < head_dim; ++element) {
      for (std::ptrdiff_t i = 0; i < kPanel; ++i) packed[element * kPanel + i] = widen_one(rows[i][element]);
    }
    packed += head_dim * kPanel;
  }
}

template <typename T>
ANTIPHON_AVX2 void pack_values(const void* page, std::ptrdiff_t num_keys, std::ptrdiff_t head_dim, float* packed) {
  const std::ptrdiff_t panel_stride = num_keys * kPanel;
  for (std::ptrdiff_t key = 0; key < num_keys; ++key) {
    const T* from = static_cast<const T*>(page) + key * head_dim;
    float* to = packed + key * kPanel;
    std::ptrdiff_t column = 0;
    for (; column + kPanel <= head_dim; column += kPanel) {
      _mm256_store_ps(to, widen_eight(from + column));
      _mm256_store_ps(to + 8, widen_eight(from + column + 8));
      to += panel_stride;
    }
    for (std::ptrdiff_t i = 0; column < head_dim && i < kPanel; ++i) {
      to[i] = column + i < head_dim ? widen_one(from[column + i]) : 0.0f;
    }
  }
}

}  // namespace

const AttentionForm kAvx2Attention = {
    {pack_keys<float>, pack_keys<std::uint16_t>, pack_keys<std::int8_t>},
    {pack_values<float>, pack_values<std::uint16_t>, pack_values<std::int8_t>},
    {run_tile<1>, run_tile<2>, run_tile<3>, run_tile<4>, run_tile<5>, run_tile<6>},
};

}  // namespace antiphon::cpu
#endif
