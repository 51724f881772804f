#include "cpu/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace antiphon::cpu {
namespace {

#if defined(__x86_64__)

// XCR0: the register files that the system saves and restores.
constexpr std::uint64_t kSavesAvx = 0x6;            // SSE, AVX
constexpr std::uint64_t kSavesAvx512 = 0xe6;        // and masks, upper halves, zmm16-31
constexpr std::uint64_t kSavesTiles = 0x3u << 17;   // tile configuration and data

struct Registers {
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
};

// Zeros for a leaf that is not there.
Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d) == 0) return Registers{};
  return r;
}

std::uint64_t xcr0() {
  std::uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

constexpr bool has(std::uint32_t bits, std::initializer_list<int> positions) {
  for (int position : positions) {
    if ((bits >> position & 1u) == 0) return false;
  }
  return true;
}

bool tiles_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuFeatures detect() {
  CpuFeatures features;
  const Registers leaf1 = cpuid(1, 0);
  constexpr int kFma = 12, kOsxsave = 27, kAvx = 28;
  if (!has(leaf1.c, {kFma, kOsxsave, kAvx})) return features;
  const std::uint64_t saved = xcr0();
  if ((saved & kSavesAvx) != kSavesAvx) return features;

  const Registers leaf7 = cpuid(7, 0);
  constexpr int kAvx2 = 5, kAvx512F = 16, kAvx512Dq = 17, kAvx512Bw = 30, kAvx512Vl = 31;  // EBX
  constexpr int kAvx512Vnni = 11;                                                          // ECX
  constexpr int kAmxBf16 = 22, kAmxTile = 24, kAmxInt8 = 25;                               // EDX
  features.avx2 = has(leaf7.b, {kAvx2});
  features.avx512 = features.avx2 && has(leaf7.b, {kAvx512F, kAvx512Dq, kAvx512Bw, kAvx512Vl}) &&
                    has(leaf7.c, {kAvx512Vnni}) && (saved & kSavesAvx512) == kSavesAvx512;
  constexpr int kAvx512Bf16 = 5;  // EAX of subleaf 1
  features.avx512_bf16 = features.avx512 && has(cpuid(7, 1).a, {kAvx512Bf16});
  features.amx = features.avx512_bf16 && has(leaf7.d, {kAmxBf16, kAmxTile, kAmxInt8}) &&
                 (saved & kSavesTiles) == kSavesTiles && tiles_permitted();
  return features;
}

#else

CpuFeatures detect() { return {}; }

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

std::vector<std::string> supported_isas() {
  const CpuFeatures& features = cpu_features();
  std::vector<std::string> names;
  if (features.amx) names.emplace_back("amx");
  if (features.avx512_bf16) names.emplace_back("avx512_bf16");
  if (features.avx512) names.emplace_back("avx512");
  if (features.avx2) names.emplace_back("avx2");
  names.emplace_back("portable");
  return names;
}

}  // namespace antiphon::cpu
