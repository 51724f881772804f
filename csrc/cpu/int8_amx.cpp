// The AMX int8 form: TDPBSSD on int8 activations. amx_product.h has the blocking, so the form brings its whole product.
#if defined(__x86_64__)
#include "cpu/amx_product.h"
#include "cpu/int8_avx512.h"
#include "cpu/int8_linear.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kStepK = 64;

struct Int8Product {
  const Int8Weight& weight;
  const float* x;
  const float* bias;
  const float* residual;
  float* y;
  float* x_scales;  // [num_rows]

  ANTIPHON_AMX void pack_row(std::ptrdiff_t row, char* line, std::ptrdiff_t step_bytes) const {
    const float* values = x + row * weight.num_k;
    const RowScale scale = row_scale(values, weight.num_k, weight.levels);
    x_scales[row] = scale.scale;
    for (std::ptrdiff_t step = 0; step < weight.num_k; step += kStepK, line += step_bytes) {
      for (std::ptrdiff_t k = step; k < step + kStepK; k += 16) {
        const __mmask16 lanes = scale.inverse == 0.0f ? __mmask16{0} : first_lanes(weight.num_k - k);
        const __m512i q = quantize(values + std::min(k, weight.num_k), lanes, scale.inverse);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(line + k - step), _mm512_cvtepi32_epi8(q));
      }
    }
  }

  template <int kRowTiles>
  ANTIPHON_AMX ANTIPHON_INLINE static void multiply() {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }

  ANTIPHON_AMX ANTIPHON_INLINE void write_row(std::ptrdiff_t row, std::ptrdiff_t column, const char* left,
                                              const char* right) const {
    write_half(row, column, left);
    if (column + 16 < weight.num_columns) write_half(row, column + 16, right);
  }

  ANTIPHON_AMX ANTIPHON_INLINE void write_half(std::ptrdiff_t row, std::ptrdiff_t column, const char* sums) const {
    const std::ptrdiff_t place = row * weight.num_columns + column;
    const Int8Columns at{weight.scales + column, bias == nullptr ? nullptr : bias + column,
                         residual == nullptr ? nullptr : residual + place, y + place};
    write_int8_sums(_mm512_loadu_si512(sums), x_scales[row], at, first_lanes(weight.num_columns - column));
  }
};

// One panel: [step][half][line = four k][16 columns][4].
void pack_panel(const std::int8_t* rows, std::ptrdiff_t num_columns, std::ptrdiff_t num_k, void* panel) {
  std::int8_t* out = static_cast<std::int8_t*>(panel);
  for (std::ptrdiff_t step = 0; step < num_k; step += kStepK) {
    for (std::ptrdiff_t half = 0; half < amx::kPanelColumns; half += 16) {
      for (std::ptrdiff_t k = step; k < step + kStepK; k += 4) {
        for (std::ptrdiff_t column = half; column < half + 16; ++column) {
          for (std::ptrdiff_t i = k; i < k + 4; ++i) {
            *out++ = column < num_columns && i < num_k ? rows[column * num_k + i] : std::int8_t{0};
          }
        }
      }
    }
  }
}

void product(const Int8Weight& weight, const float* bias, const float* x, std::ptrdiff_t num_rows,
             const float* residual, float* y) {
  if (num_rows == 0) return;
  thread_local Workspace workspace;
  const Int8Product product{weight, x, bias, residual, y, workspace.at_least<float>(num_rows)};
  amx::run_product(product, weight.panels,
                   amx::Shape{num_rows, weight.num_columns, ceil_div(weight.num_k, kStepK)});
}

}  // namespace

const Int8Form kAmxInt8Form = {
    amx::kPanelColumns,
    /*tile_rows=*/amx::kBlockRows,
    /*k_multiple=*/kStepK,
    /*block_k=*/amx::kInnerSteps * kStepK,
    /*activation_bytes=*/1,
    /*panel_extra_bytes=*/0,
    kByteLevels,
    pack_panel,
    /*pack_rows=*/nullptr,
    /*tile=*/nullptr,
    product,
};

}  // namespace antiphon::cpu
#endif
