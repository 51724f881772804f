// Which functions may use which instructions. A build that emulates them (tests/csrc) defines ANTIPHON_EMULATED, so that
// the compiler itself cannot choose an instruction that the testing machine lacks.
#pragma once

#if defined(ANTIPHON_EMULATED)
#define ANTIPHON_AVX512
#define ANTIPHON_AMX
#else
#define ANTIPHON_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define ANTIPHON_AMX \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8")))
#endif
#define ANTIPHON_INLINE __attribute__((always_inline)) inline
