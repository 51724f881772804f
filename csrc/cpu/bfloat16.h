// bfloat16 is the upper half of a float32.
#pragma once

#include <cstdint>

#include "cpu/float_bits.h"

namespace antiphon::cpu {

// To nearest, ties to even. A NaN stays one. No branch: loops over it become vector instructions.
inline std::uint16_t round_to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const std::uint32_t quiet_nan = bits | 0x400000u;
  return static_cast<std::uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded) >> 16);
}

}  // namespace antiphon::cpu
