// bfloat16 on AMX tiles: see amx_linear.h for the numbers, amx_product.h for the blocking.
#if defined(__x86_64__)
#include "cpu/amx_linear.h"
#include "cpu/amx_product.h"
#include "cpu/bfloat16.h"

namespace antiphon::cpu {
namespace {

static_assert(kAmxPanelColumns == amx::kPanelColumns, "one panel, one width");

struct Bf16Product {
  const float* x;
  const float* bias;
  const float* residual;
  float* y;
  std::ptrdiff_t num_columns;
  std::ptrdiff_t num_k;

  ANTIPHON_AMX void pack_row(std::ptrdiff_t row, char* line, std::ptrdiff_t step_bytes) const {
    const float* values = x + row * num_k;
    std::ptrdiff_t k = 0;
    for (; k + kAmxBf16StepK <= num_k; k += kAmxBf16StepK, line += step_bytes) {
      store_line(_mm512_loadu_ps(values + k), _mm512_loadu_ps(values + k + 16), line);
    }
    if (k == num_k) return;
    const __m512 low = _mm512_maskz_loadu_ps(first_lanes(num_k - k), values + k);
    const __m512 high = _mm512_maskz_loadu_ps(first_lanes(num_k - k - 16), values + std::min(k + 16, num_k));
    store_line(low, high, line);
  }

  ANTIPHON_AMX ANTIPHON_INLINE static void store_line(__m512 low, __m512 high, char* line) {
    _mm512_storeu_si512(line, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }

  template <int kRowTiles>
  ANTIPHON_AMX ANTIPHON_INLINE static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  ANTIPHON_AMX ANTIPHON_INLINE void write_row(std::ptrdiff_t row, std::ptrdiff_t column, const char* left,
                                              const char* right) const {
    write_half(row, column, left);
    if (column + 16 < num_columns) write_half(row, column + 16, right);
  }

  ANTIPHON_AMX ANTIPHON_INLINE void write_half(std::ptrdiff_t row, std::ptrdiff_t column, const char* sums) const {
    const __mmask16 lanes = first_lanes(num_columns - column);
    __m512 value = _mm512_loadu_ps(sums);
    if (bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, bias + column));
    const std::ptrdiff_t at = row * num_columns + column;
    if (residual != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, residual + at));
    _mm512_mask_storeu_ps(y + at, lanes, value);
  }
};

// One panel: [step][half][line = pair of k][16 columns][2].
void pack_panel(const float* rows, std::ptrdiff_t num_columns, std::ptrdiff_t num_k, std::uint16_t* out) {
  const std::ptrdiff_t padded_k = ceil_div(num_k, kAmxBf16StepK) * kAmxBf16StepK;
  for (std::ptrdiff_t step = 0; step < padded_k; step += kAmxBf16StepK) {
    for (std::ptrdiff_t half = 0; half < kAmxPanelColumns; half += 16) {
      for (std::ptrdiff_t k = step; k < step + kAmxBf16StepK; k += 2) {
        for (std::ptrdiff_t column = half; column < half + 16; ++column) {
          for (std::ptrdiff_t i = k; i < k + 2; ++i) {
            *out++ = column < num_columns && i < num_k ? round_to_bfloat16(rows[column * num_k + i]) : 0;
          }
        }
      }
    }
  }
}

std::ptrdiff_t panel_bytes(std::ptrdiff_t num_k) {
  return ceil_div(num_k, kAmxBf16StepK) * amx::kPanelStepBytes;
}

}  // namespace

std::size_t amx_bf16_packed_bytes(std::ptrdiff_t num_columns, std::ptrdiff_t num_k) {
  return static_cast<std::size_t>(ceil_div(num_columns, kAmxPanelColumns) * panel_bytes(num_k));
}

void amx_bf16_pack_rows(const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t num_k,
                        void* packed) {
  char* out = static_cast<char*>(packed) + first_row / kAmxPanelColumns * panel_bytes(num_k);
  parallel_for(ceil_div(num_rows, kAmxPanelColumns), [&](std::ptrdiff_t panel, int) {
    const std::ptrdiff_t row = panel * kAmxPanelColumns;
    pack_panel(rows + row * num_k, std::min(kAmxPanelColumns, num_rows - row), num_k,
               reinterpret_cast<std::uint16_t*>(out + panel * panel_bytes(num_k)));
  });
}

void amx_bf16_linear(const AmxBf16Weight& weight, const float* bias, const float* residual, const float* x,
                     std::ptrdiff_t num_rows, float* y) {
  if (num_rows == 0) return;
  const Bf16Product product{x, bias, residual, y, weight.num_columns, weight.num_k};
  amx::run_product(product, weight.data,
                   amx::Shape{num_rows, weight.num_columns, ceil_div(weight.num_k, kAmxBf16StepK)});
}

}  // namespace antiphon::cpu
#endif
