// bfloat16 is the upper half of a float32.
#pragma once

#include <cstdint>
#include <cstring>

namespace antiphon::cpu {

// To nearest, ties to even. A NaN stays one.
inline std::uint16_t round_to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace antiphon::cpu
