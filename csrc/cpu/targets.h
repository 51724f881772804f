// Which functions may use which instructions. A build that emulates them (tests/csrc/wide) defines ANTIPHON_EMULATED,
// so that the compiler itself cannot choose an instruction that the testing machine lacks; and it leaves loops as they
// stand, for a quicker build.
#pragma once

#if defined(ANTIPHON_EMULATED)
#define ANTIPHON_AVX512
#define ANTIPHON_AVX512_BF16
#define ANTIPHON_AMX
#define ANTIPHON_UNROLL(count)
#else
#define ANTIPHON_PRAGMA(text) _Pragma(#text)
#define ANTIPHON_UNROLL(count) ANTIPHON_PRAGMA(GCC unroll count)
#define ANTIPHON_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define ANTIPHON_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")))
#define ANTIPHON_AMX \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8")))
#endif
#define ANTIPHON_INLINE __attribute__((always_inline)) inline
