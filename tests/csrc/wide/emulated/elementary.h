// AVX-512's elementary functions on one number, as Intel's Software Developer's Manual describes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

// VREDUCEPS with 0x09: x - floor(x), the difference rounded down too, so always below 1; 0 for an infinity. Exact in
// float64, but next to 1.
inline float past_floor(float x) {
  if (std::isinf(x)) return 0.0f;
  const double exact = double{x} - std::floor(double{x});
  const float nearest = static_cast<float>(exact);
  const float down = nearest > exact ? std::nextafter(nearest, 0.0f) : nearest;
  return std::min(down, 0x1.fffffep-1f);  // NaN is passed on: the comparison with it is false
}

// VSCALEFPS: value * 2^floor(x).
inline float scale(float value, float x) {
  if (std::isnan(x)) return x;
  if (std::isinf(x)) return value * (x > 0.0f ? x : 0.0f);
  return std::ldexp(value, static_cast<int>(std::floor(std::clamp(x, -500.0f, 500.0f))));
}

// VRCP14PS: within 2^-14 of 1 / x. The processor's digits past that are others.
inline float reciprocal(float x) {
  float y = 1.0f / x;
  if (std::isnan(x) || std::isinf(y)) return y;
  std::uint32_t bits;
  std::memcpy(&bits, &y, sizeof(bits));
  bits &= ~std::uint32_t{0x1ff};
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

}  // namespace emulated
