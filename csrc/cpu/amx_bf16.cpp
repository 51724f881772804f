// bfloat16 on AMX tiles: see amx_linear.h for the numbers, amx_product.h for the blocking.
#if defined(__x86_64__)
#include "cpu/amx_linear.h"
#include "cpu/amx_operands.h"
#include "cpu/amx_product.h"
#include "cpu/amx_sinks.h"
#include "cpu/bfloat16.h"

namespace antiphon::cpu {
namespace {

static_assert(kAmxPanelColumns == amx::kPanelColumns, "one panel, one width");

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
  amx::run_product<amx::Bf16Tiles>(
      amx::FloatsToBf16<PlainRows>{{x, weight.num_k}},
      amx::FloatSums{bias, residual, y, weight.num_columns, {y, num_rows, weight.num_columns}}, weight.data,
      amx::Shape{num_rows, weight.num_columns, ceil_div(weight.num_k, kAmxBf16StepK)});
}

}  // namespace antiphon::cpu
#endif
