// What the int8 forms of AVX-512 and AMX share: the scale of a row of x, its quantisation, and sums to y. The formulas
// are int8_linear.h's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/avx512.h"
#include "cpu/int8_linear.h"

namespace antiphon::cpu {

constexpr std::int32_t kByteLevels = 127;

struct RowScale {
  float scale;    // of the row: 0 if all zeros, NaN if one is not finite
  float inverse;  // to multiply x with; 0 stores zeros
};

// From the bits of a row's largest absolute value; those of an infinity or a NaN are above all finite ones'.
inline RowScale scale_of(std::uint32_t absmax_bits, std::int32_t levels) {
  if (absmax_bits >= 0x7f800000u) return {NAN, 0.0f};
  float absmax;
  std::memcpy(&absmax, &absmax_bits, sizeof(absmax));
  if (absmax < kSmallestAbsmax) return {0.0f, 0.0f};
  return {absmax / static_cast<float>(levels), static_cast<float>(levels) / absmax};
}

// As integers, absolute values are ordered as they are.
ANTIPHON_AVX512 inline RowScale row_scale(const float* x, std::ptrdiff_t num_k, std::int32_t levels) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (std::ptrdiff_t k = 0; k < num_k; k += 32) {
    for (int half = 0; half < 2; ++half) {
      const __mmask16 lanes = first_lanes(num_k - k - 16 * half);
      const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, x + k + (lanes == 0 ? 0 : 16 * half)));
      largest[half] = _mm512_max_epu32(largest[half], _mm512_and_si512(bits, magnitude));
    }
  }
  return scale_of(_mm512_reduce_max_epu32(_mm512_max_epu32(largest[0], largest[1])), levels);
}

// Up to 16 values, those outside `lanes` being zeros. A row that is not finite has `inverse` 0, and must not be read.
ANTIPHON_AVX512 ANTIPHON_INLINE __m512i quantize(const float* x, __mmask16 lanes, float inverse) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x), _mm512_set1_ps(inverse)));
}

// Where 16 columns of a row of y get their scales and what is added to them.
struct Int8Columns {
  const float* w_scales;
  const float* bias;      // or null
  const float* residual;  // or null
};

ANTIPHON_AVX512 ANTIPHON_INLINE __m512 scaled_int8_sums(__m512i sums, float x_scale, const Int8Columns& at,
                                                        __mmask16 lanes) {
  const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(x_scale), _mm512_maskz_loadu_ps(lanes, at.w_scales));
  __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale);
  if (at.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, at.bias));
  if (at.residual != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, at.residual));
  return value;
}

}  // namespace antiphon::cpu
