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
ANTIPHON_AMX void multiply_registers(std::ptrdiff_t num_rounds) {
  amx::load_config(amx::kTileLines);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (std::ptrdiff_t i = 0; i < num_rounds; ++i) Tiles::template multiply<2>();
  _tile_release();
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

double multiply_tiles(bool int8, std::ptrdiff_t num_rounds) {
  const int threads = num_threads();
#if defined(__x86_64__)
  parallel_for(threads, [&](std::ptrdiff_t, int) {
    int8 ? multiply_registers<amx::Int8Tiles>(num_rounds) : multiply_registers<amx::Bf16Tiles>(num_rounds);
  });
#endif
  const double operations = 4.0 * 16 * 16 * (int8 ? 64 : 32) * 2;  // of a round
  return operations * static_cast<double>(num_rounds) * threads;
}

}  // namespace antiphon::cpu
