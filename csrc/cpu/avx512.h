// Small things that the AVX-512 and AMX kernels share.
#pragma once

// g++ 12 warns of the undefined operand that its own header passes to intrinsics without a mask (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstddef>

#include "cpu/targets.h"

namespace antiphon::cpu {

// The first `count` of 16 lanes: none for a count below 1, all from 16 on.
ANTIPHON_AVX512 ANTIPHON_INLINE __mmask16 first_lanes(std::ptrdiff_t count) {
  if (count <= 0) return 0;
  return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1);
}

}  // namespace antiphon::cpu
