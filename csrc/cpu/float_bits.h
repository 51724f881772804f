// A float32 as its bits, and back. As integers, absolute values are ordered as they are, infinities and NaN above all
// finite ones.
#pragma once

#include <cstdint>
#include <cstring>

namespace antiphon::cpu {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace antiphon::cpu
