// What comes out of a product on AMX tiles: sums to float32 rows (see amx_product.h).
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/int8_avx512.h"

namespace antiphon::cpu::amx {

// How rows of y leave: past the caches where y is too large to stay in them, which spares reading the lines first.
class Output {
 public:
  Output(float* y, std::ptrdiff_t num_rows, std::ptrdiff_t num_columns)
      : past_caches_(num_rows * num_columns * 4 >= kLargeBytes && num_columns % 16 == 0 &&
                     reinterpret_cast<std::uintptr_t>(y) % 64 == 0) {}

  ANTIPHON_INLINE void fetch(const float* at) const {
    if (past_caches_) return;
    __builtin_prefetch(at, 1);
    __builtin_prefetch(at + 16, 1);
  }

  ANTIPHON_AVX512 ANTIPHON_INLINE void store(float* at, __mmask16 lanes, __m512 value) const {
    if (past_caches_) {
      _mm512_stream_ps(at, value);  // num_columns being whole vectors, so are the lanes
    } else {
      _mm512_mask_storeu_ps(at, lanes, value);
    }
  }

 private:
  static constexpr std::ptrdiff_t kLargeBytes = 2 << 20;
  bool past_caches_;
};

// float32 sums, plus bias[num_columns] and residual[rows][num_columns], either of which may be null.
struct FloatSums {
  const float* bias;
  const float* residual;
  float* y;
  std::ptrdiff_t num_columns;
  Output output;

  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void fetch(std::ptrdiff_t row, std::ptrdiff_t column) const {
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) output.fetch(y + (row + i) * num_columns + column);
  }

  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void write(std::ptrdiff_t row, std::ptrdiff_t column, const char* sums) const {
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) write_half(row + i, column, _mm512_loadu_ps(sums + i * kLineBytes));
    if (column + 16 >= num_columns) return;
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) {
      write_half(row + i, column + 16, _mm512_loadu_ps(sums + kTileBytes + i * kLineBytes));
    }
  }

  // 16 sums of a row from `column` on, or as many as there are columns.
  ANTIPHON_AVX512 ANTIPHON_INLINE void write_half(std::ptrdiff_t row, std::ptrdiff_t column, __m512 value) const {
    const __mmask16 lanes = first_lanes(num_columns - column);
    if (bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, bias + column));
    const std::ptrdiff_t at = row * num_columns + column;
    if (residual != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, residual + at));
    output.store(y + at, lanes, value);
  }
};

// int32 sums, made float32 as int8_linear.h says.
struct Int8Sums {
  const Int8Weight& weight;
  const float* x_scales;  // [rows]
  const float* bias;
  const float* residual;
  float* y;
  Output output;

  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void fetch(std::ptrdiff_t row, std::ptrdiff_t column) const {
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) output.fetch(y + (row + i) * weight.num_columns + column);
  }

  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void write(std::ptrdiff_t row, std::ptrdiff_t column, const char* sums) const {
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) write_half(row + i, column, sums + i * kLineBytes);
    if (column + 16 >= weight.num_columns) return;
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) write_half(row + i, column + 16, sums + kTileBytes + i * kLineBytes);
  }

  ANTIPHON_AMX ANTIPHON_INLINE void write_half(std::ptrdiff_t row, std::ptrdiff_t column, const char* sums) const {
    const std::ptrdiff_t place = row * weight.num_columns + column;
    const Int8Columns at{weight.scales + column, bias == nullptr ? nullptr : bias + column,
                         residual == nullptr ? nullptr : residual + place};
    const __mmask16 lanes = first_lanes(weight.num_columns - column);
    output.store(y + place, lanes, scaled_int8_sums(_mm512_loadu_si512(sums), x_scales[row], at, lanes));
  }
};

}  // namespace antiphon::cpu::amx
