// What goes into a product on AMX tiles: one step's multiplication, and rows of x as 64-byte lines (see amx_product.h).
#pragma once

#include "cpu/amx_linear.h"
#include "cpu/amx_tiles.h"
#include "cpu/int8_avx512.h"

namespace antiphon::cpu::amx {

static_assert(kAmxPanelColumns == kPanelColumns, "one panel, one width");

constexpr std::ptrdiff_t kInt8StepK = 64;

struct Bf16Tiles {
  template <int kRowTiles>
  ANTIPHON_AMX ANTIPHON_INLINE static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

struct Int8Tiles {
  template <int kRowTiles>
  ANTIPHON_AMX ANTIPHON_INLINE static void multiply() {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
};

// float32 rows, rounded to bfloat16.
struct FloatsToBf16 {
  struct Row {};

  const float* x;
  std::ptrdiff_t num_k;

  ANTIPHON_AMX ANTIPHON_INLINE Row row(std::ptrdiff_t) const { return {}; }

  ANTIPHON_AMX ANTIPHON_INLINE void pack(std::ptrdiff_t row, Row, std::ptrdiff_t step, char* line) const {
    const std::ptrdiff_t k = step * kAmxBf16StepK;
    const float* values = x + row * num_k + k;
    const __m512 low = _mm512_maskz_loadu_ps(first_lanes(num_k - k), values);
    const __m512 high = _mm512_maskz_loadu_ps(first_lanes(num_k - k - 16), values + std::min<std::ptrdiff_t>(16, num_k - k));
    _mm512_storeu_si512(line, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
};

// float32 rows, quantised to int8 as int8_linear.h says; their scales go to scales[row].
struct FloatsToInt8 {
  using Row = float;  // what values are multiplied with; 0 stores zeros

  const float* x;
  std::ptrdiff_t num_k;
  std::int32_t levels;
  float* scales;

  ANTIPHON_AMX ANTIPHON_INLINE Row row(std::ptrdiff_t row) const {
    const RowScale scale = row_scale(x + row * num_k, num_k, levels);
    scales[row] = scale.scale;
    return scale.inverse;
  }

  ANTIPHON_AMX ANTIPHON_INLINE void pack(std::ptrdiff_t row, Row inverse, std::ptrdiff_t step, char* line) const {
    const float* values = x + row * num_k;
    ANTIPHON_UNROLL(4)
    for (std::ptrdiff_t part = 0; part < 4; ++part) {
      const std::ptrdiff_t k = step * kInt8StepK + 16 * part;
      const __mmask16 lanes = inverse == 0.0f ? __mmask16{0} : first_lanes(num_k - k);
      const __m512i q = quantize(values + std::min(k, num_k), lanes, inverse);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(line + 16 * part), _mm512_cvtepi32_epi8(q));
    }
  }
};

// bfloat16 rows, row_stride apart and padded with zeros to whole steps, quantised likewise.
struct Bf16ToInt8 {
  using Row = float;

  const std::uint16_t* x;  // of row first_row
  std::ptrdiff_t first_row;
  std::ptrdiff_t row_stride;  // a multiple of 64
  std::int32_t levels;
  float* scales;

  ANTIPHON_AMX ANTIPHON_INLINE static __m512 widen(const std::uint16_t* values) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
  }

  ANTIPHON_AMX ANTIPHON_INLINE Row row(std::ptrdiff_t row) const {
    const std::uint16_t* values = x + (row - first_row) * row_stride;
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);  // as integers, absolute values are ordered as they are
    __m512i largest = _mm512_setzero_si512();
    for (std::ptrdiff_t k = 0; k < row_stride; k += 32) {
      largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_loadu_si512(values + k), magnitude));
    }
    largest = _mm512_max_epu16(largest, _mm512_srli_epi32(largest, 16));
    const std::uint32_t bits = _mm512_reduce_max_epu32(_mm512_slli_epi32(largest, 16));
    const RowScale scale = scale_of(bits, levels);
    scales[row] = scale.scale;
    return scale.inverse;
  }

  ANTIPHON_AMX ANTIPHON_INLINE void pack(std::ptrdiff_t row, Row inverse, std::ptrdiff_t step, char* line) const {
    const std::uint16_t* values = x + (row - first_row) * row_stride + step * kInt8StepK;
    ANTIPHON_UNROLL(4)
    for (std::ptrdiff_t part = 0; part < 4; ++part) {
      const __m512 scaled = _mm512_mul_ps(widen(values + 16 * part), _mm512_set1_ps(inverse));
      const __m512i q = inverse == 0.0f ? _mm512_setzero_si512() : _mm512_cvtps_epi32(scaled);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(line + 16 * part), _mm512_cvtepi32_epi8(q));
    }
  }
};

}  // namespace antiphon::cpu::amx
