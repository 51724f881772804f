// What the tiles' sums and the quantisation are promised to be, one element at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "checks.h"
#include "cpu/amx_linear.h"
#include "cpu/int8_linear.h"
#include "tiles.h"

namespace naive {

using checks::Floats;

inline float to_bfloat16_and_back(float value) { return emulated::from_bfloat16(emulated::to_bfloat16(value)); }

inline Floats rounded(const Floats& values) {
  Floats out(values.size());
  std::transform(values.begin(), values.end(), out.begin(), to_bfloat16_and_back);
  return out;
}

// amx_linear.h's sum of bfloat16 values. A product of two is exact in float32 but for its exponent.
inline float bf16_sum(const float* x, const float* w, std::ptrdiff_t num_k) {
  using namespace antiphon::cpu;
  float sum = 0.0f;
  for (std::ptrdiff_t step = 0; step < num_k; step += kAmxBf16StepK) {
    float even = 0.0f, odd = 0.0f;
    const std::ptrdiff_t end = std::min(num_k, step + kAmxBf16StepK);
    for (std::ptrdiff_t k = step; k < end; k += 2) even = emulated::flush(std::fmaf(x[k], w[k], even));
    for (std::ptrdiff_t k = step + 1; k < end; k += 2) odd = emulated::flush(std::fmaf(x[k], w[k], odd));
    sum = emulated::flush(sum + emulated::flush(even + odd));
  }
  return sum;
}

// amx_operands.h's NormedRows, one row.
inline Floats normed(const float* x, const Floats& weight, float eps) {
  float sums[64] = {};  // lane i of part p at 16 p + i
  for (std::size_t k = 0; k < weight.size(); ++k) sums[k % 64] = std::fmaf(x[k], x[k], sums[k % 64]);
  for (int i = 0; i < 16; ++i) sums[i] = (sums[i] + sums[16 + i]) + (sums[32 + i] + sums[48 + i]);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  const float scale = 1.0f / std::sqrt(sums[0] / static_cast<float>(weight.size()) + eps);
  Floats out;
  for (std::size_t k = 0; k < weight.size(); ++k) out.push_back((x[k] * scale) * weight[k]);
  return out;
}

// int8_linear.h's weight.
struct Int8Rows {
  std::vector<std::int8_t> values;
  Floats scales;

  Int8Rows(const Floats& weight, std::ptrdiff_t num_columns, std::ptrdiff_t num_k)
      : values(weight.size()), scales(static_cast<std::size_t>(num_columns)) {
    for (std::ptrdiff_t n = 0; n < num_columns; ++n) {
      const float* row = &weight[n * num_k];
      float absmax = 0.0f;
      for (std::ptrdiff_t k = 0; k < num_k; ++k) absmax = std::max(absmax, std::fabs(row[k]));
      scales[n] = absmax / 127.0f;
      for (std::ptrdiff_t k = 0; k < num_k && absmax > 0.0f; ++k) {
        values[n * num_k + k] = static_cast<std::int8_t>(std::nearbyint(row[k] / scales[n]));
      }
    }
  }
};

// int8_linear.h's row of activations: its values to q, which has as many; returns its scale.
inline float quantize_row(const float* x, std::int32_t levels, std::vector<std::int32_t>& q) {
  float absmax = 0.0f;
  bool finite = true;
  for (std::size_t k = 0; k < q.size(); ++k) {
    finite = finite && std::isfinite(x[k]);
    absmax = std::max(absmax, std::fabs(x[k]));
  }
  std::fill(q.begin(), q.end(), 0);
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  if (absmax < antiphon::cpu::kSmallestAbsmax) return 0.0f;
  const float inverse = static_cast<float>(levels) / absmax;
  for (std::size_t k = 0; k < q.size(); ++k) q[k] = static_cast<std::int32_t>(std::nearbyint(x[k] * inverse));
  return absmax / static_cast<float>(levels);
}

// Column n of a quantised row's product, scaled.
inline float int8_product(const std::vector<std::int32_t>& q, float scale, const Int8Rows& weight, std::ptrdiff_t n) {
  const std::int8_t* w = &weight.values[n * q.size()];
  std::int64_t sum = 0;
  for (std::size_t k = 0; k < q.size(); ++k) sum += std::int64_t{q[k]} * w[k];
  return static_cast<float>(sum) * (scale * weight.scales[n]);
}

}  // namespace naive
