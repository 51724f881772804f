// The scale of a row of x, as int8_linear.h says: the same in every form.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/float_bits.h"
#include "cpu/int8_linear.h"

namespace antiphon::cpu {

struct RowScale {
  float scale;    // of the row: 0 if all zeros, NaN if one is not finite
  float inverse;  // to multiply x with; 0 stores zeros
};

// From the bits of a row's largest absolute value.
inline RowScale scale_of(std::uint32_t absmax_bits, std::int32_t levels) {
  if (absmax_bits >= 0x7f800000u) return {NAN, 0.0f};
  const float absmax = float_of(absmax_bits);
  if (absmax < kSmallestAbsmax) return {0.0f, 0.0f};
  return {absmax / static_cast<float>(levels), static_cast<float>(levels) / absmax};
}

}  // namespace antiphon::cpu
