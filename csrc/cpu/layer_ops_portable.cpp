// Portable row functions: plain C++ that a compiler can vectorise for any machine, and that valgrind can follow.
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/exp_portable.h"
#include "cpu/hadamard.h"
#include "cpu/layer_ops.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kLanes = 32;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

float sum_of(float (&lanes)[kLanes]) {
  for (std::ptrdiff_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::ptrdiff_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// add(lane, k) for every k of a row, lane = k mod 32.
template <typename Add>
inline void over_lanes(std::ptrdiff_t size, Add&& add) {
  std::ptrdiff_t k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    for (std::ptrdiff_t lane = 0; lane < kLanes; ++lane) add(lane, k + lane);
  }
  for (std::ptrdiff_t lane = 0; k + lane < size; ++lane) add(lane, k + lane);
}

void rms_norm_row(const float* x, const float* weight, std::ptrdiff_t size, float eps, float* out) {
  float lanes[kLanes] = {};
  over_lanes(size, [&](std::ptrdiff_t lane, std::ptrdiff_t k) { lanes[lane] += x[k] * x[k]; });
  const float scale = 1.0f / std::sqrt(sum_of(lanes) / static_cast<float>(size) + eps);
  for (std::ptrdiff_t k = 0; k < size; ++k) out[k] = x[k] * scale * weight[k];
}

void silu_and_mul_row(const float* gate, const float* up, std::ptrdiff_t size, float* out) {
  for (std::ptrdiff_t k = 0; k < size; ++k) out[k] = gate[k] / (1.0f + exp_portable(-gate[k])) * up[k];
}

void hadamard_row(float* x, std::ptrdiff_t size, std::ptrdiff_t block) { hadamard<Lanes4>(x, size, block); }

void widen_row(const std::uint16_t* row, std::ptrdiff_t size, float* out) {
  for (std::ptrdiff_t k = 0; k < size; ++k) {
    const std::uint32_t bits = static_cast<std::uint32_t>(row[k]) << 16;
    std::memcpy(out + k, &bits, sizeof(bits));
  }
}

PartialSoftmax partial_softmax(const float* logits, std::ptrdiff_t size) {
  float largest = kMinusInfinity;
  for (std::ptrdiff_t k = 0; k < size; ++k) largest = logits[k] > largest ? logits[k] : largest;
  const float shift = std::isfinite(largest) ? largest : 0.0f;
  float lanes[kLanes] = {};
  over_lanes(size, [&](std::ptrdiff_t lane, std::ptrdiff_t k) { lanes[lane] += exp_portable(logits[k] - shift); });
  return {largest, sum_of(lanes)};
}

Peak peak(const float* values, const std::uint8_t* allowed, std::ptrdiff_t size) {
  Peak peak{kMinusInfinity, -1, false};
  for (std::ptrdiff_t k = 0; k < size; ++k) {
    if (std::isnan(values[k])) peak.has_nan = true;
    if (values[k] > peak.value && (allowed == nullptr || allowed[k] != 0)) {
      peak.value = values[k];
      peak.index = k;
    }
  }
  return peak;
}

}  // namespace

const LayerForm kPortableLayerForm = {rms_norm_row, silu_and_mul_row, hadamard_row, widen_row, partial_softmax, peak};

}  // namespace antiphon::cpu
