// e^x of eight floats at once, for the AVX2 forms of the kernels. Method and constants: exp_portable.h.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/exp_portable.h"

namespace antiphon::cpu {

// Any x: -inf gives 0, +inf and overflow +inf, NaN NaN; error under 1 unit in the last place.
__attribute__((target("avx2,fma"), always_inline)) inline __m256 exp_avx2(__m256 x) {
  using C = ExpConstants;
  x = _mm256_max_ps(_mm256_set1_ps(C::kLowest), x);  // in this order of operands a NaN stays
  x = _mm256_min_ps(_mm256_set1_ps(C::kHighest), x);
  const __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(C::kLog2E), _mm256_set1_ps(C::kRound));
  const __m256 n = _mm256_sub_ps(shifted, _mm256_set1_ps(C::kRound));
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(C::kLn2High), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(C::kLn2Low), r);
  __m256 p = _mm256_set1_ps(C::kC6);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(C::kC5));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(C::kC4));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(C::kC3));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(C::kC2));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(C::kRoundBits));
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}

}  // namespace antiphon::cpu
#endif
