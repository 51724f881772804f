// Walsh-Hadamard transforms of float32 values: blocks of `block` consecutive ones (a power of two), each times the
// symmetric matrix of +1 and -1 in natural order, over sqrt(block):
//   out[i] = (sum over j of (-1)^popcount(i & j) x[j]) * (1 / sqrt(block))
// Summed in butterflies (a, b) -> (a + b, a - b) of values h apart, h = block / 2 first, then a half of it, down to 1, so
// that every form gives the same bits. In the compiler's vectors, which a function inlines in its own instructions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "cpu/targets.h"

namespace antiphon::cpu {

constexpr std::ptrdiff_t kNearValues = 32;     // butterflies among so many consecutive values are made in registers
constexpr std::ptrdiff_t kMostFarVectors = 8;  // and those of so many vectors, kNearValues apart

// x[i], x[i + h] for i below h, in every 2 h of x[size].
ANTIPHON_INLINE void hadamard_step(float* x, std::ptrdiff_t size, std::ptrdiff_t h) {
  for (std::ptrdiff_t first = 0; first < size; first += 2 * h) {
    for (std::ptrdiff_t i = first; i < first + h; ++i) {
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
}

struct Lanes4 {
  static constexpr int kWidth = 4;
  typedef float Vector __attribute__((vector_size(16)));
  typedef int Bits __attribute__((vector_size(16)));
};

struct Lanes8 {
  static constexpr int kWidth = 8;
  typedef float Vector __attribute__((vector_size(32)));
  typedef int Bits __attribute__((vector_size(32)));
};

struct Lanes16 {
  static constexpr int kWidth = 16;
  typedef float Vector __attribute__((vector_size(64)));
  typedef int Bits __attribute__((vector_size(64)));
};

template <typename Lanes>
struct HadamardBlocks {
  static constexpr int kWidth = Lanes::kWidth;
  using Vector = typename Lanes::Vector;
  using Bits = typename Lanes::Bits;

  ANTIPHON_INLINE static void load(Vector& v, const float* x) { std::memcpy(&v, x, sizeof(v)); }
  ANTIPHON_INLINE static void store(float* x, const Vector& v) { std::memcpy(x, &v, sizeof(v)); }

  // Lanes h apart.
  template <int h>
  ANTIPHON_INLINE static void step_within(Vector& v) {
    Bits partner, sign;
    ANTIPHON_UNROLL(16)
    for (int lane = 0; lane < kWidth; ++lane) {
      partner[lane] = lane ^ h;
      sign[lane] = (lane & h) != 0 ? static_cast<int>(0x80000000u) : 0;
    }
#if defined(__clang__)
    Vector other;
    for (int lane = 0; lane < kWidth; ++lane) other[lane] = v[lane ^ h];
#else
    const Vector other = __builtin_shuffle(v, partner);
#endif
    v = other + (Vector)((Bits)v ^ sign);
  }

  ANTIPHON_INLINE static void butterfly(Vector& a, Vector& b) {
    const Vector sum = a + b;
    b = a - b;
    a = sum;
  }

  // h = kNearValues kFar / 2 down to kNearValues.
  template <int kFar>
  ANTIPHON_INLINE static void far_steps(float* x) {
    for (std::ptrdiff_t first = 0; first < kNearValues; first += kWidth) {
      Vector v[kFar];
      ANTIPHON_UNROLL(8)
      for (int i = 0; i < kFar; ++i) load(v[i], x + first + i * kNearValues);
      ANTIPHON_UNROLL(8)
      for (int h = kFar / 2; h > 0; h /= 2) {
        ANTIPHON_UNROLL(8)
        for (int i = 0; i < kFar; ++i) {
          if ((i & h) == 0) butterfly(v[i], v[i + h]);
        }
      }
      ANTIPHON_UNROLL(8)
      for (int i = 0; i < kFar; ++i) store(x + first + i * kNearValues, v[i]);
    }
  }

  // h = kNearValues / 2 down to 1, and the scale.
  ANTIPHON_INLINE static void near_steps(float* x, float scale) {
    constexpr int kVectors = kNearValues / kWidth;
    Vector v[kVectors];
    ANTIPHON_UNROLL(8)
    for (int i = 0; i < kVectors; ++i) load(v[i], x + i * kWidth);
    ANTIPHON_UNROLL(8)
    for (int h = kVectors / 2; h > 0; h /= 2) {
      ANTIPHON_UNROLL(8)
      for (int i = 0; i < kVectors; ++i) {
        if ((i & h) == 0) butterfly(v[i], v[i + h]);
      }
    }
    ANTIPHON_UNROLL(8)
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kWidth >= 16) step_within<8>(v[i]);
      if constexpr (kWidth >= 8) step_within<4>(v[i]);
      step_within<2>(v[i]);
      step_within<1>(v[i]);
      v[i] *= scale;
      store(x + i * kWidth, v[i]);
    }
  }

  template <int kFar>
  ANTIPHON_INLINE static void all(float* x, std::ptrdiff_t size, float scale) {
    for (std::ptrdiff_t first = 0; first < size; first += kFar * kNearValues) {
      if constexpr (kFar > 1) far_steps<kFar>(x + first);
      for (std::ptrdiff_t near = first; near < first + kFar * kNearValues; near += kNearValues) {
        near_steps(x + near, scale);
      }
    }
  }
};

// All blocks of x[size], in place; block divides size.
template <typename Lanes>
ANTIPHON_INLINE void hadamard(float* x, std::ptrdiff_t size, std::ptrdiff_t block) {
  using Blocks = HadamardBlocks<Lanes>;
  const float scale = 1.0f / std::sqrt(static_cast<float>(block));
  std::ptrdiff_t h = block / 2;
  for (; h >= kMostFarVectors * kNearValues || (h > 0 && block < kNearValues); h /= 2) hadamard_step(x, size, h);
  switch (2 * h / kNearValues) {
    case 8: return Blocks::template all<8>(x, size, scale);
    case 4: return Blocks::template all<4>(x, size, scale);
    case 2: return Blocks::template all<2>(x, size, scale);
    case 1: return Blocks::template all<1>(x, size, scale);
  }
  if (block == 1) return;
  for (std::ptrdiff_t k = 0; k < size; ++k) x[k] *= scale;
}

}  // namespace antiphon::cpu
