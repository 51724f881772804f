// e^x in float32, the portable form, and the constants that the vector forms share.
//
// x = n ln 2 + r with n a whole number and |r| <= ln(2) / 2; e^r by a polynomial of degree 6, its two lowest
// coefficients 1 and the others minimax for the relative error (2^-28.3); then times 2^n in two steps, so that a result
// below the smallest normal number is rounded once. Worst error over all floats, in units in the last place: 1.18 here,
// 0.91 in the form with fused multiply-adds (exp_avx2.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace antiphon::cpu {

struct ExpConstants {
  static constexpr float kLowest = -104.0f;  // e^x is 0 below it, and infinite above kHighest
  static constexpr float kHighest = 89.0f;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kRound = 12582912.0f;  // 1.5 x 2^23: adding it leaves a whole number in the low bits
  static constexpr std::int32_t kRoundBits = 0x4b400000;
  static constexpr float kLn2High = 0.693359375f;  // few enough bits that its product with n is exact
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr float kC2 = 0x1.fffffcp-2f;
  static constexpr float kC3 = 0x1.555490p-3f;
  static constexpr float kC4 = 0x1.5558f4p-5f;
  static constexpr float kC5 = 0x1.123a6cp-7f;
  static constexpr float kC6 = 0x1.6a2352p-10f;
};

// Any x: -inf gives 0, +inf and overflow +inf, NaN NaN. A loop over it is vectorised by the compiler.
inline float exp_portable(float x) {
  using C = ExpConstants;
  x = x < C::kLowest ? C::kLowest : x;  // in this form a NaN stays
  x = x > C::kHighest ? C::kHighest : x;
  const float shifted = x * C::kLog2E + C::kRound;
  const float n = shifted - C::kRound;
  const float r = (x - n * C::kLn2High) - n * C::kLn2Low;
  float p = C::kC6;
  p = p * r + C::kC5;
  p = p * r + C::kC4;
  p = p * r + C::kC3;
  p = p * r + C::kC2;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const std::int32_t exponent = static_cast<std::int32_t>(bits - static_cast<std::uint32_t>(C::kRoundBits));
  const std::int32_t half = exponent >> 1;
  const std::uint32_t first_bits = (static_cast<std::uint32_t>(half) + 127u) << 23;
  const std::uint32_t second_bits = (static_cast<std::uint32_t>(exponent - half) + 127u) << 23;
  float first, second;
  std::memcpy(&first, &first_bits, sizeof(first));
  std::memcpy(&second, &second_bits, sizeof(second));
  return p * first * second;
}

}  // namespace antiphon::cpu
