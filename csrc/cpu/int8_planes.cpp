// See int8_planes.h.
#include "cpu/int8_planes.h"

#include <algorithm>

#include "cpu/float_bits.h"
#include "cpu/int8_scale.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kTaskRows = 16;
constexpr std::int32_t kByteLevels = 127;

// left[k] = x[k] - x_scale * q_x[k], rounded twice; zeros where a value is not finite.
void remainder_of(const float* x, std::ptrdiff_t num_k, std::int32_t levels, float* left) {
  std::uint32_t absmax = 0;
  for (std::ptrdiff_t k = 0; k < num_k; ++k) absmax = std::max(absmax, bits_of(x[k]) & 0x7fffffffu);
  const RowScale scale = scale_of(absmax, levels);
  if (scale.inverse == 0.0f) {
    std::fill_n(left, num_k, 0.0f);
    return;
  }
  constexpr float kRound = 0x1.8p23f;  // adding it and taking it off again leaves the nearest integer, ties to even
  for (std::ptrdiff_t k = 0; k < num_k; ++k) {
    const float shifted = x[k] * scale.inverse + kRound;
    left[k] = x[k] - scale.scale * (shifted - kRound);
  }
}

}  // namespace

void int8_linear(const Int8Form& form, const Int8Planes& planes, const float* bias, const float* x,
                 std::ptrdiff_t num_rows, const float* residual, float* y) {
  const Int8Weight& weight = planes.weight;
  if (planes.fine.panels != nullptr) {
    int8_linear(form, planes.fine, nullptr, x, num_rows, residual, y);
    residual = y;
  }
  if (planes.fine_x && form.max_levels == kByteLevels) {
    thread_local Workspace workspace;
    float* left = workspace.at_least<float>(num_rows * weight.num_k);
    parallel_for(ceil_div(num_rows, kTaskRows), [&](std::ptrdiff_t task, int) {
      for (std::ptrdiff_t row = task * kTaskRows; row < std::min(num_rows, (task + 1) * kTaskRows); ++row) {
        remainder_of(x + row * weight.num_k, weight.num_k, weight.levels, left + row * weight.num_k);
      }
    });
    int8_linear(form, weight, nullptr, left, num_rows, residual, y);
    residual = y;
  }
  int8_linear(form, weight, bias, x, num_rows, residual, y);
}

void int8_remainder(float* rows, std::ptrdiff_t num_rows, std::ptrdiff_t num_k) {
  parallel_for(num_rows, [&](std::ptrdiff_t row, int) {
    thread_local Workspace workspace;
    std::int8_t* quantized = workspace.at_least<std::int8_t>(num_k);
    float* values = rows + row * num_k;
    float scale;
    quantize_weights(values, num_k, quantized, &scale);
    for (std::ptrdiff_t k = 0; k < num_k; ++k) values[k] -= scale * static_cast<float>(quantized[k]);
  });
}

}  // namespace antiphon::cpu
