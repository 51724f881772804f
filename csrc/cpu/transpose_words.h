// A square of 32-bit words turned over, in registers: what packs rows side by side.
#pragma once

#include "cpu/avx512.h"

namespace antiphon::cpu {

// Sixteen lines of sixteen 32-bit words, transposed in place.
ANTIPHON_AVX512 ANTIPHON_INLINE void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  ANTIPHON_UNROLL(8)
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  ANTIPHON_UNROLL(4)
  for (int i = 0; i < 16; i += 4) {  // now r[i + j], of each quarter, column j of lines i to i + 3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  ANTIPHON_UNROLL(4)
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);  // quarters 0, 2
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
  ANTIPHON_UNROLL(4)
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

}  // namespace antiphon::cpu
