// What this processor and this system can run. All of it is asked for at run time: the build fixes nothing.
#pragma once

#include <string>
#include <vector>

namespace antiphon::cpu {

// avx2        AVX2, FMA
// avx512      AVX-512 F, BW, VL, DQ and VNNI (Cascade Lake, Zen 4 and newer), with the system saving its registers
// avx512_bf16 avx512 and AVX-512 BF16 (Cooper Lake, Sapphire Rapids, Zen 4 and newer)
// amx         avx512_bf16, AMX tiles with bfloat16 and int8, and the system's permission to use the tiles
struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool amx = false;
};

// Asked for once per process. The first call also asks Linux for the tiles' permission, which holds for every thread of
// the process and cannot be given back; a refusal leaves `amx` false.
const CpuFeatures& cpu_features();

// Names of the forms this machine can run, the best first: of amx, avx512_bf16, avx512, avx2, portable.
std::vector<std::string> supported_isas();

}  // namespace antiphon::cpu
