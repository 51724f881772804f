// AVX2 + FMA row functions. The elements past the last whole vector are loaded under a mask, as zeros or -inf, and go
// through the same code, so that no element's value depends on where a row ends.
#if defined(__x86_64__)
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/avx2.h"
#include "cpu/exp_avx2.h"
#include "cpu/hadamard.h"
#include "cpu/layer_ops.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kVector = 8;
constexpr std::ptrdiff_t kLanes = 32;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// All bits set in the first `count` elements, count 0..8.
ANTIPHON_AVX2_INLINE __m256i first_elements(std::ptrdiff_t count) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), index);
}

// A vector at data + k, of which the row has `size - k` elements; the rest are `missing`.
ANTIPHON_AVX2_INLINE __m256 load(const float* data, std::ptrdiff_t k, std::ptrdiff_t size, float missing) {
  if (k + kVector <= size) return _mm256_loadu_ps(data + k);
  const __m256i mask = first_elements(std::max<std::ptrdiff_t>(0, size - k));
  const __m256 there = _mm256_maskload_ps(data + std::min(k, size), mask);
  return _mm256_blendv_ps(_mm256_set1_ps(missing), there, _mm256_castsi256_ps(mask));
}

ANTIPHON_AVX2_INLINE float sum_of(const __m256 (&lanes)[4]) {
  const __m256 eight = _mm256_add_ps(_mm256_add_ps(lanes[0], lanes[2]), _mm256_add_ps(lanes[1], lanes[3]));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

ANTIPHON_AVX2_INLINE float largest_of(const __m256 (&lanes)[4]) {
  const __m256 eight = _mm256_max_ps(_mm256_max_ps(lanes[0], lanes[2]), _mm256_max_ps(lanes[1], lanes[3]));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

ANTIPHON_AVX2 void rms_norm_row(const float* x, const float* weight, std::ptrdiff_t size, float eps, float* out) {
  __m256 lanes[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  for (std::ptrdiff_t k = 0; k < size; k += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 value = load(x, k + i * kVector, size, 0.0f);
      lanes[i] = _mm256_fmadd_ps(value, value, lanes[i]);
    }
  }
  const __m256 scale = _mm256_set1_ps(1.0f / std::sqrt(sum_of(lanes) / static_cast<float>(size) + eps));
  std::ptrdiff_t k = 0;
  for (; k + kVector <= size; k += kVector) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + k), scale);
    _mm256_storeu_ps(out + k, _mm256_mul_ps(scaled, _mm256_loadu_ps(weight + k)));
  }
  if (k < size) {
    const __m256i mask = first_elements(size - k);
    const __m256 scaled = _mm256_mul_ps(_mm256_maskload_ps(x + k, mask), scale);
    _mm256_maskstore_ps(out + k, mask, _mm256_mul_ps(scaled, _mm256_maskload_ps(weight + k, mask)));
  }
}

ANTIPHON_AVX2_INLINE __m256 silu_and_mul(__m256 gate, __m256 up) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 minus_gate = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0f));
  return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(one, exp_avx2(minus_gate))), up);
}

ANTIPHON_AVX2 void silu_and_mul_row(const float* gate, const float* up, std::ptrdiff_t size, float* out) {
  std::ptrdiff_t k = 0;
  for (; k + 2 * kVector <= size; k += 2 * kVector) {  // two chains of dependent steps at a time
    const __m256 first = silu_and_mul(_mm256_loadu_ps(gate + k), _mm256_loadu_ps(up + k));
    const __m256 second = silu_and_mul(_mm256_loadu_ps(gate + k + kVector), _mm256_loadu_ps(up + k + kVector));
    _mm256_storeu_ps(out + k, first);
    _mm256_storeu_ps(out + k + kVector, second);
  }
  for (; k < size; k += kVector) {
    const __m256i mask = first_elements(std::min(kVector, size - k));
    const __m256 value = silu_and_mul(_mm256_maskload_ps(gate + k, mask), _mm256_maskload_ps(up + k, mask));
    _mm256_maskstore_ps(out + k, mask, value);
  }
}

ANTIPHON_AVX2 void hadamard_row(float* x, std::ptrdiff_t size, std::ptrdiff_t block) {
  hadamard<Lanes8>(x, size, block);
}

ANTIPHON_AVX2 void widen_row(const std::uint16_t* row, std::ptrdiff_t size, float* out) {
  std::ptrdiff_t k = 0;
  for (; k + kVector <= size; k += kVector) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), _mm256_slli_epi32(wide, 16));
  }
  for (; k < size; ++k) {
    const std::uint32_t bits = static_cast<std::uint32_t>(row[k]) << 16;
    std::memcpy(out + k, &bits, sizeof(bits));
  }
}

ANTIPHON_AVX2 PartialSoftmax partial_softmax(const float* logits, std::ptrdiff_t size) {
  const __m256 nothing = _mm256_set1_ps(kMinusInfinity);
  __m256 largest[4] = {nothing, nothing, nothing, nothing};
  for (std::ptrdiff_t k = 0; k < size; k += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // in this order of operands a NaN is passed over
      largest[i] = _mm256_max_ps(load(logits, k + i * kVector, size, kMinusInfinity), largest[i]);
    }
  }
  PartialSoftmax result{largest_of(largest), 0.0f};
  const __m256 shift = _mm256_set1_ps(std::isfinite(result.largest) ? result.largest : 0.0f);
  __m256 lanes[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  for (std::ptrdiff_t k = 0; k < size; k += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 logit = load(logits, k + i * kVector, size, kMinusInfinity);
      lanes[i] = _mm256_add_ps(lanes[i], exp_avx2(_mm256_sub_ps(logit, shift)));
    }
  }
  result.sum = sum_of(lanes);
  return result;
}

// Values from k on, those that are not allowed as -inf; `nan` collects where one is NaN.
template <bool kMasked>
ANTIPHON_AVX2_INLINE __m256 load_allowed(const float* values, const std::uint8_t* allowed, std::ptrdiff_t k,
                                    std::ptrdiff_t size, __m256& nan) {
  const __m256 value = load(values, k, size, kMinusInfinity);
  nan = _mm256_or_ps(nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  if constexpr (!kMasked) return value;
  std::uint64_t bytes = 0;
  if (k + kVector <= size) {
    std::memcpy(&bytes, allowed + k, sizeof(bytes));
  } else {
    std::memcpy(&bytes, allowed + k, static_cast<std::size_t>(size - k));
  }
  const __m256i flags = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
  const __m256i refused = _mm256_cmpeq_epi32(flags, _mm256_setzero_si256());
  return _mm256_blendv_ps(value, _mm256_set1_ps(kMinusInfinity), _mm256_castsi256_ps(refused));
}

// The largest value of each block is compared with the best so far; only the best block is searched for its index.
template <bool kMasked>
ANTIPHON_AVX2 Peak find_peak(const float* values, const std::uint8_t* allowed, std::ptrdiff_t size) {
  constexpr std::ptrdiff_t kBlock = 1024;
  Peak peak{kMinusInfinity, -1, false};
  __m256 nan = _mm256_setzero_ps();
  std::ptrdiff_t best_block = -1;
  for (std::ptrdiff_t block = 0; block < size; block += kBlock) {
    const __m256 nothing = _mm256_set1_ps(kMinusInfinity);
    __m256 largest[4] = {nothing, nothing, nothing, nothing};
    const std::ptrdiff_t end = std::min(size, block + kBlock);
    for (std::ptrdiff_t k = block; k < end; k += kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const std::ptrdiff_t at = std::min(k + i * kVector, end);
        largest[i] = _mm256_max_ps(load_allowed<kMasked>(values, allowed, at, end, nan), largest[i]);
      }
    }
    const float value = largest_of(largest);
    if (value > peak.value) {
      peak.value = value;
      best_block = block;
    }
  }
  peak.has_nan = _mm256_movemask_ps(nan) != 0;
  if (best_block < 0) return peak;
  peak.index = best_block;
  while (values[peak.index] != peak.value || (kMasked && allowed[peak.index] == 0)) ++peak.index;
  return peak;
}

ANTIPHON_AVX2 Peak peak(const float* values, const std::uint8_t* allowed, std::ptrdiff_t size) {
  return allowed != nullptr ? find_peak<true>(values, allowed, size) : find_peak<false>(values, allowed, size);
}

}  // namespace

const LayerForm kAvx2LayerForm = {rms_norm_row, silu_and_mul_row, hadamard_row, widen_row, partial_softmax, peak};

}  // namespace antiphon::cpu
#endif
