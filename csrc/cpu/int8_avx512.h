// What the int8 forms of AVX-512 and AMX share: the scale of a row of x, its quantisation, and sums to y. The formulas
// are int8_linear.h's.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/avx512.h"
#include "cpu/int8_scale.h"

namespace antiphon::cpu {

constexpr std::int32_t kByteLevels = 127;

// float32 rows as they are.
struct PlainRows {
  using Row = const float*;

  const float* x;
  std::ptrdiff_t num_k;

  ANTIPHON_AVX512 ANTIPHON_INLINE Row row(std::ptrdiff_t row) const { return x + row * num_k; }

  // Up to 16 values from k on, those outside `lanes` being zeros.
  ANTIPHON_AVX512 ANTIPHON_INLINE __m512 at(Row row, std::ptrdiff_t k, __mmask16 lanes) const {
    return _mm512_maskz_loadu_ps(lanes, row + k);
  }
};

// Rows is PlainRows, or gives values likewise.
template <typename Rows>
ANTIPHON_AVX512 ANTIPHON_INLINE RowScale row_scale(const Rows& x, const typename Rows::Row& row, std::int32_t levels) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (std::ptrdiff_t k = 0; k < x.num_k; k += 32) {
    ANTIPHON_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      const std::ptrdiff_t at = std::min(k + 16 * half, x.num_k);
      const __m512i bits = _mm512_castps_si512(x.at(row, at, first_lanes(x.num_k - at)));
      largest[half] = _mm512_max_epu32(largest[half], _mm512_and_si512(bits, magnitude));
    }
  }
  return scale_of(_mm512_reduce_max_epu32(_mm512_max_epu32(largest[0], largest[1])), levels);
}

// Up to 16 values from k on, those past the row being zeros. With `inverse` 0, as where a row is not finite, all are.
template <typename Rows>
ANTIPHON_AVX512 ANTIPHON_INLINE __m512i quantize(const Rows& x, const typename Rows::Row& row, std::ptrdiff_t k,
                                                 float inverse) {
  const __mmask16 lanes = inverse == 0.0f ? __mmask16{0} : first_lanes(x.num_k - k);
  return _mm512_cvtps_epi32(_mm512_mul_ps(x.at(row, k, lanes), _mm512_set1_ps(inverse)));
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
