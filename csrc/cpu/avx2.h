// What the AVX2 + FMA forms share.
#pragma once

#include <immintrin.h>

#define ANTIPHON_AVX2 __attribute__((target("avx2,fma")))
#define ANTIPHON_AVX2_INLINE ANTIPHON_AVX2 __attribute__((always_inline)) inline

namespace antiphon::cpu {

// sum += x * line, in place. As an intrinsic, g++ 12 picks forms that overwrite x or line, and spills sums to make up.
ANTIPHON_AVX2_INLINE void multiply_add(__m256& sum, const __m256& x, const __m256& line) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(line));
}

}  // namespace antiphon::cpu
