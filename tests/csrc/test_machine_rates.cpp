// The work that floors are made of is really done: every byte is read, every round multiplied, by whatever threads.
#include <cstdint>
#include <vector>

#include "check.h"
#include "cpu/cpu_features.h"
#include "cpu/machine_rates.h"
#include "cpu/pool.h"

namespace {

using namespace antiphon::cpu;

constexpr std::ptrdiff_t kLineBytes = 64;

// Exactly `num_bytes` on the heap: a sanitizer sees what is read past them.
std::vector<char> bytes(std::ptrdiff_t num_bytes) {
  std::vector<char> out(static_cast<std::size_t>(num_bytes));
  std::uint32_t seed = 1;
  for (char& byte : out) {
    seed = seed * 1664525u + 1013904223u;
    byte = static_cast<char>(seed >> 24);
  }
  return out;
}

TEST(read_memory_reads_every_line_whatever_the_threads) {
  for (const std::ptrdiff_t num_lines : {1, 2, 3, 16383, 16384, 16385, 40000}) {  // around pieces of 1 MiB
    std::vector<char> data = bytes(num_lines * kLineBytes);
    set_num_threads(1);
    const unsigned long long alone = read_memory(data.data(), num_lines * kLineBytes);
    for (const int threads : {2, 3}) {
      set_num_threads(threads);
      CHECK(read_memory(data.data(), num_lines * kLineBytes) == alone);
    }
    for (const std::ptrdiff_t line : {std::ptrdiff_t{0}, num_lines / 2, num_lines - 1}) {
      char& byte = data[static_cast<std::size_t>(line * kLineBytes)];
      byte = static_cast<char>(byte ^ 1);
      CHECK(read_memory(data.data(), num_lines * kLineBytes) != alone);
      byte = static_cast<char>(byte ^ 1);
    }
  }
  set_num_threads(1);
}

TEST(read_memory_of_nothing_is_nothing) { CHECK(read_memory(nullptr, 0) == 0); }

TEST(multiply_registers_counts_the_operations_of_all_threads) {
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    for (const std::ptrdiff_t num_rounds : {0, 1, 10}) {
      const auto check = [&](Isa isa, std::ptrdiff_t bf16, std::ptrdiff_t int8) {
        CHECK(multiply_registers(isa, false, num_rounds) == static_cast<double>(threads * num_rounds * bf16));
        CHECK(multiply_registers(isa, true, num_rounds) == static_cast<double>(threads * num_rounds * int8));
      };
      // Of a round, two for each multiply-add: 4 sums of 16 x 16 over 32 or 64 of k; 14 sums of 16 over 2 or 4.
      if (cpu_features().amx) check(Isa::kAmx, 4 * 256 * 32 * 2, 4 * 256 * 64 * 2);
      if (cpu_features().avx512_bf16) check(Isa::kAvx512Bf16, 14 * 16 * 2 * 2, 14 * 16 * 4 * 2);
    }
  }
  set_num_threads(1);
}

}  // namespace
