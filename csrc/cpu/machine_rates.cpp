// See machine_rates.h.
#include "cpu/machine_rates.h"

#include <algorithm>
#include <atomic>

#include "cpu/cpu_features.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"

#if defined(__x86_64__)
#include "cpu/amx_operands.h"
#include "cpu/avx2.h"
#endif

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kLineBytes = 64;
constexpr std::ptrdiff_t kPieceBytes = 1 << 20;

unsigned long long read_plain(const char* data, std::ptrdiff_t num_bytes) {
  unsigned long long sum = 0;
  for (std::ptrdiff_t i = 0; i < num_bytes; i += 8) sum ^= *reinterpret_cast<const unsigned long long*>(data + i);
  return sum;
}

#if defined(__x86_64__)
ANTIPHON_AVX2 unsigned long long read_avx2(const char* data, std::ptrdiff_t num_bytes) {
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (std::ptrdiff_t i = 0; i < num_bytes; i += kLineBytes) {
    const __m256i* line = reinterpret_cast<const __m256i*>(data + i);
    sums[0] = _mm256_xor_si256(sums[0], _mm256_loadu_si256(line));
    sums[1] = _mm256_xor_si256(sums[1], _mm256_loadu_si256(line + 1));
  }
  return static_cast<unsigned long long>(_mm256_extract_epi64(_mm256_xor_si256(sums[0], sums[1]), 0));
}

template <typename Tiles>
ANTIPHON_AMX void multiply_tiles(std::ptrdiff_t num_rounds) {
  amx::load_config(amx::kTileLines);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (std::ptrdiff_t i = 0; i < num_rounds; ++i) Tiles::template multiply<2>();
  _tile_release();
}

constexpr int kVectorSums = 14;  // more than an instruction's latency has of them

template <bool kInt8>
ANTIPHON_AVX512_BF16 void multiply_vectors(std::ptrdiff_t num_rounds) {
  __m512i sums[kVectorSums] = {};
  const __m512i operand = _mm512_setzero_si512();
  for (std::ptrdiff_t i = 0; i < num_rounds; ++i) {
    ANTIPHON_UNROLL(14)
    for (int sum = 0; sum < kVectorSums; ++sum) {  // volatile: no compiler leaves out what nobody uses
      if constexpr (kInt8) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[sum]) : "v"(operand));
      if constexpr (!kInt8) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sums[sum]) : "v"(operand));
    }
  }
}
#endif

}  // namespace

unsigned long long read_memory(const void* data, std::ptrdiff_t num_bytes) {
  std::atomic<unsigned long long> sum{0};
  parallel_for(ceil_div(num_bytes, kPieceBytes), [&](std::ptrdiff_t piece, int) {
    const char* begin = static_cast<const char*>(data) + piece * kPieceBytes;
    const std::ptrdiff_t bytes = std::min(kPieceBytes, num_bytes - piece * kPieceBytes);
#if defined(__x86_64__)
    if (cpu_features().avx2) {
      sum ^= read_avx2(begin, bytes);
      return;
    }
#endif
    sum ^= read_plain(begin, bytes);
  });
  return sum;
}

double multiply_registers(Isa isa, bool int8, std::ptrdiff_t num_rounds) {
  const int threads = num_threads();
  double operations = 0.0;  // of a round
#if defined(__x86_64__)
  using Multiply = void (*)(std::ptrdiff_t);
  const bool tiles = isa == Isa::kAmx;
  const Multiply of_tiles = int8 ? multiply_tiles<amx::Int8Tiles> : multiply_tiles<amx::Bf16Tiles>;
  const Multiply of_vectors = int8 ? multiply_vectors<true> : multiply_vectors<false>;
  parallel_for(threads, [&](std::ptrdiff_t, int) { (tiles ? of_tiles : of_vectors)(num_rounds); });
  operations = 2.0 * (tiles ? 4 * 16 * 16 * (int8 ? 64 : 32) : kVectorSums * 16 * (int8 ? 4 : 2));
#else
  static_cast<void>(isa);
  static_cast<void>(int8);
#endif
  return operations * static_cast<double>(num_rounds) * threads;
}

}  // namespace antiphon::cpu
