// What one thread can do at most, for benchmarks/attention.py: TDPBF16PS on registers, and reading `argv[1]` MiB. Prints
// GFLOP/s and GB/s, the best of several tries. g++ -O2 -std=c++17 -mamx-tile -mamx-bf16 -mavx512f
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

struct alignas(64) Config {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

template <typename Work>
double seconds(Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double flops_per_second() {
  constexpr int kSteps = 200000;
  return kSteps * 4.0 * 16 * 16 * 32 * 2 / seconds([] {
    for (int i = 0; i < kSteps; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  });
}

double bytes_per_second(const std::vector<std::uint64_t>& words) {
  __m512i sums[4] = {};
  const double time = seconds([&] {
    for (std::size_t i = 0; i + 32 <= words.size(); i += 32) {
      for (int j = 0; j < 4; ++j) sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512(&words[i + 8 * j]));
    }
    asm volatile("" ::"v"(sums[0]), "v"(sums[1]), "v"(sums[2]), "v"(sums[3]));
  });
  return static_cast<double>(words.size() * 8) / time;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;
  const Config config;
  asm volatile("" ::"m"(config) : "memory");
  _tile_loadconfig(&config);
  const std::vector<std::uint64_t> words(static_cast<std::size_t>(std::atoi(argv[1])) << 17, 3);
  double flops = 0.0, bytes = 0.0;
  for (int i = 0; i < 12; ++i) {
    flops = std::max(flops, flops_per_second());
    bytes = std::max(bytes, bytes_per_second(words));
  }
  std::printf("%.1f %.2f\n", flops / 1e9, bytes / 1e9);
  return 0;
}
