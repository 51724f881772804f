// Operands of the kernels' tests, in heap buffers of exactly their size, and the forms to be tested.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/kv_layer.h"

namespace antiphon::testing {

using Floats = std::vector<float>;

// Multiples of 1/32 from -2 on and below 2: few enough bits that bfloat16 holds them.
inline Floats values(std::ptrdiff_t count, std::uint32_t seed) {
  Floats out(static_cast<std::size_t>(count));
  for (float& value : out) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int>(seed >> 25) - 64) / 32.0f;
  }
  return out;
}

inline Floats poison(std::ptrdiff_t count) {
  return Floats(static_cast<std::size_t>(count), std::numeric_limits<float>::quiet_NaN());
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), sizeof(T) * a.size()) == 0);
}

// Elements [first, first + count), in a buffer of their own.
inline Floats part(const Floats& of, std::ptrdiff_t first, std::ptrdiff_t count) {
  return Floats(of.begin() + first, of.begin() + first + count);
}

// Whether a value is as near to what is expected as a bound says. A NaN is not.
inline bool near(double value, double expected, double bound) { return std::abs(value - expected) <= bound; }

constexpr cpu::KvStorage kKvStorages[] = {cpu::KvStorage::kFloat32, cpu::KvStorage::kBfloat16, cpu::KvStorage::kInt8};

// Element i of those that are stored in `pool`, without its scale. values() can be stored as they are; int8 times 32.
inline void store(cpu::KvStorage storage, float value, std::vector<char>& pool, std::ptrdiff_t i) {
  const std::ptrdiff_t bytes = cpu::element_bytes(storage);
  const char code = static_cast<char>(value * 32.0f);
  const char* from = bytes == 1 ? &code : reinterpret_cast<const char*>(&value) + 4 - bytes;
  std::memcpy(pool.data() + i * bytes, from, static_cast<std::size_t>(bytes));
}

inline float stored(cpu::KvStorage storage, const std::vector<char>& pool, std::ptrdiff_t i) {
  if (storage == cpu::KvStorage::kInt8) return static_cast<float>(static_cast<signed char>(pool.data()[i]));
  const std::ptrdiff_t bytes = cpu::element_bytes(storage);
  float value = 0.0f;
  std::memcpy(reinterpret_cast<char*>(&value) + 4 - bytes, pool.data() + i * bytes, static_cast<std::size_t>(bytes));
  return value;
}

template <typename Form>
std::vector<const Form*> runnable(const Form& portable, const Form* avx2) {
  std::vector<const Form*> found{&portable};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(avx2);
#endif
  static_cast<void>(avx2);
  return found;
}

}  // namespace antiphon::testing

// The forms that this machine runs. A name that only x86-64 declares is not looked at elsewhere.
#if defined(__x86_64__)
#define FORMS(portable, avx2) antiphon::testing::runnable(portable, &avx2)
#else
#define FORMS(portable, avx2) antiphon::testing::runnable(portable, decltype(&portable){nullptr})
#endif
