// The AMX int8 form: TDPBSSD on int8 activations. amx_product.h has the blocking, so the form brings its whole product.
#if defined(__x86_64__)
#include "cpu/amx_operands.h"
#include "cpu/amx_product.h"
#include "cpu/amx_sinks.h"
#include "cpu/int8_avx512.h"
#include "cpu/int8_linear.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kStepK = amx::kInt8StepK;

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
  float* scales = workspace.at_least<float>(num_rows);
  amx::run_product<amx::Int8Tiles>(
      amx::FloatsToInt8<PlainRows>{{x, weight.num_k}, weight.levels, scales},
      amx::Int8Sums{weight, scales, bias, residual, y, {y, num_rows, weight.num_columns}}, weight.panels,
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
