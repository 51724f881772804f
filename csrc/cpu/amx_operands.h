// What goes into a product on AMX tiles: one step's multiplication, and rows of x as 64-byte lines (see amx_product.h).
#pragma once

#include <cmath>

#include "cpu/amx_linear.h"
#include "cpu/amx_tiles.h"
#include "cpu/hadamard.h"
#include "cpu/int8_avx512.h"
#include "cpu/workspace.h"

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

// float32 rows under an RMS norm: x * (1 / sqrt(mean of x^2 + eps)) * weight. The squares are summed in 4 x 16 lanes,
// lane i of them in ascending k, then ((0 + 1) + (2 + 3)), and the 16 by adding the upper half to the lower, 4 times.
struct NormedRows {
  struct Row {
    const float* values;
    float scale;
  };

  const float* x;
  std::ptrdiff_t num_k;
  const float* weight;  // [num_k]
  float eps;

  ANTIPHON_AVX512 ANTIPHON_INLINE Row row(std::ptrdiff_t row) const {
    const float* values = x + row * num_k;
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (std::ptrdiff_t k = 0; k < num_k; k += 64) {
      ANTIPHON_UNROLL(4)
      for (int part = 0; part < 4; ++part) {
        const std::ptrdiff_t at = std::min(k + 16 * part, num_k);
        const __m512 value = _mm512_maskz_loadu_ps(first_lanes(num_k - at), values + at);
        sums[part] = _mm512_fmadd_ps(value, value, sums[part]);
      }
    }
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    return {values, 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(num_k) + eps)};
  }

  ANTIPHON_AVX512 ANTIPHON_INLINE __m512 at(Row row, std::ptrdiff_t k, __mmask16 lanes) const {
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, row.values + k), _mm512_set1_ps(row.scale));
    return _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + k));
  }
};

// Rows rounded to bfloat16.
template <typename Rows>
struct FloatsToBf16 {
  using Row = typename Rows::Row;

  Rows x;

  ANTIPHON_AMX ANTIPHON_INLINE Row row(std::ptrdiff_t row) const { return x.row(row); }

  ANTIPHON_AMX ANTIPHON_INLINE void pack(std::ptrdiff_t, Row row, std::ptrdiff_t step, char* line) const {
    const std::ptrdiff_t k = step * kAmxBf16StepK;
    const __m512 low = x.at(row, k, first_lanes(x.num_k - k));
    const __m512 high = x.at(row, std::min(k + 16, x.num_k), first_lanes(x.num_k - k - 16));
    _mm512_storeu_si512(line, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
};

// Rows quantised to int8 as int8_linear.h says; their scales go to scales[row].
template <typename Rows>
struct FloatsToInt8 {
  struct Row {
    typename Rows::Row values;
    float inverse;  // what they are multiplied with; 0 stores zeros
  };

  Rows x;
  std::int32_t levels;
  float* scales;

  ANTIPHON_AMX ANTIPHON_INLINE Row row(std::ptrdiff_t row) const {
    const typename Rows::Row values = x.row(row);
    const RowScale scale = row_scale(x, values, levels);
    scales[row] = scale.scale;
    return {values, scale.inverse};
  }

  ANTIPHON_AMX ANTIPHON_INLINE void pack(std::ptrdiff_t, Row row, std::ptrdiff_t step, char* line) const {
    ANTIPHON_UNROLL(4)
    for (std::ptrdiff_t part = 0; part < 4; ++part) {
      const std::ptrdiff_t k = std::min(step * kInt8StepK + 16 * part, x.num_k);
      const __m512i q = quantize(x, row.values, k, row.inverse);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(line + 16 * part), _mm512_cvtepi32_epi8(q));
    }
  }
};

// bfloat16 rows, row_stride apart and padded with zeros to whole steps, quantised likewise. With a block over 1, blocks
// of a row go through their Walsh-Hadamard matrix first, in place, and are rounded to bfloat16 again.
struct Bf16ToInt8 {
  using Row = float;  // what values are multiplied with; 0 stores zeros

  std::uint16_t* x;  // of row first_row
  std::ptrdiff_t first_row;
  std::ptrdiff_t row_stride;  // a multiple of 64
  std::ptrdiff_t num_k;       // values of a row
  std::ptrdiff_t block;       // divides num_k
  std::int32_t levels;
  float* scales;

  ANTIPHON_AMX ANTIPHON_INLINE static __m512 widen(const std::uint16_t* values) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
  }

  ANTIPHON_AMX void rotate(std::uint16_t* values) const {
    thread_local Workspace workspace;
    float* wide = workspace.at_least<float>(row_stride);
    for (std::ptrdiff_t k = 0; k < row_stride; k += 16) _mm512_storeu_ps(wide + k, widen(values + k));
    hadamard<Lanes16>(wide, num_k, block);
    for (std::ptrdiff_t k = 0; k < row_stride; k += 32) {
      const __m512 low = _mm512_loadu_ps(wide + k), high = _mm512_loadu_ps(wide + k + 16);
      _mm512_storeu_si512(values + k, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }

  ANTIPHON_AMX ANTIPHON_INLINE Row row(std::ptrdiff_t row) const {
    std::uint16_t* values = x + (row - first_row) * row_stride;
    if (block > 1) rotate(values);
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
