// The AVX-512 and AMX intrinsics that csrc/cpu uses, in plain C++, found in place of the compiler's header by a build
// that puts this folder first. It lets a machine without the instructions run the kernels' own source.
//
// Each follows the operation in Intel's Software Developer's Manual. What the processor would refuse (a tile operation
// without a configuration, tiles of shapes that do not fit) ends the process with a message. A masked lane is not read.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "elementary.h"
#include "stores.h"
#include "tiles.h"

using __mmask16 = std::uint16_t;
using __mmask32 = std::uint32_t;
using __mmask64 = std::uint64_t;

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef short __m256bh __attribute__((vector_size(32), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));

namespace emulated {
typedef std::int32_t i32x16 __attribute__((vector_size(64), may_alias));
typedef std::uint32_t u32x16 __attribute__((vector_size(64), may_alias));
typedef std::uint16_t u16x32 __attribute__((vector_size(64), may_alias));

template <typename Vector>
inline Vector load(const void* address) {
  Vector vector;
  std::memcpy(&vector, address, sizeof(vector));
  return vector;
}
}  // namespace emulated

// Not inlined: a kernel unrolls hundreds of them, and the compiler would take a minute.
#define EMULATED __attribute__((noinline)) inline

// Loads, stores, constants.
EMULATED __m512 _mm512_loadu_ps(const void* p) { return emulated::load<__m512>(p); }
EMULATED __m512i _mm512_loadu_si512(const void* p) { return emulated::load<__m512i>(p); }
EMULATED __m256i _mm256_loadu_si256(const void* p) { return emulated::load<__m256i>(p); }
EMULATED void _mm512_storeu_ps(void* p, __m512 v) { std::memcpy(p, &v, sizeof(v)); }
EMULATED void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, &v, sizeof(v)); }
EMULATED void _mm_storeu_si128(void* p, __m128i v) { std::memcpy(p, &v, sizeof(v)); }
EMULATED void _mm256_storeu_si256(__m256i* p, __m256i v) { std::memcpy(p, &v, sizeof(v)); }
EMULATED __m512 _mm512_setzero_ps() { return __m512{}; }
EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
EMULATED __m512 _mm512_set1_ps(float value) { return __m512{} + value; }
EMULATED __m512i _mm512_set1_epi32(int value) { return (__m512i)(emulated::i32x16{} + value); }
EMULATED __m512i _mm512_set1_epi16(short value) {
  return (__m512i)(emulated::u16x32{} + static_cast<std::uint16_t>(value));
}
EMULATED void _mm512_stream_ps(void* p, __m512 v) { emulated::stream(p, &v); }
EMULATED void _mm_sfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
  __m512 v{};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) std::memcpy(reinterpret_cast<char*>(&v) + 4 * i, static_cast<const char*>(p) + 4 * i, 4);
  }
  return v;
}

EMULATED void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 v) {
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + 4 * i, reinterpret_cast<char*>(&v) + 4 * i, 4);
  }
}

// float32.
EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fmaf(a[i], b[i], c[i]);
  return c;
}
EMULATED __m512 _mm512_reduce_ps(__m512 v, int control) {
  if (control != 0x09) std::abort();  // another rounding than past_floor's
  for (int i = 0; i < 16; ++i) v[i] = emulated::past_floor(v[i]);
  return v;
}
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  for (int i = 0; i < 16; ++i) a[i] = emulated::scale(a[i], b[i]);
  return a;
}
EMULATED __m512 _mm512_rcp14_ps(__m512 v) {
  for (int i = 0; i < 16; ++i) v[i] = emulated::reciprocal(v[i]);
  return v;
}
EMULATED __m512 _mm512_castsi512_ps(__m512i v) { return (__m512)v; }
EMULATED __m512i _mm512_castps_si512(__m512 v) { return (__m512i)v; }
EMULATED __m512 _mm512_cvtepi32_ps(__m512i v) { return __builtin_convertvector((emulated::i32x16)v, __m512); }
// In the rounding mode of the thread, which is to nearest even; the indefinite integer where it does not fit.
EMULATED __m512i _mm512_cvtps_epi32(__m512 v) {
  emulated::i32x16 out;
  for (int i = 0; i < 16; ++i) {
    const float whole = std::nearbyintf(v[i]);
    out[i] = whole >= -0x1p31f && whole < 0x1p31f ? static_cast<std::int32_t>(whole) : INT32_MIN;
  }
  return (__m512i)out;
}

// To bfloat16, to nearest even, subnormal inputs to zero; b in the lower half of the result.
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  __m512bh out;
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<short>(emulated::to_bfloat16(b[i]));
    out[i + 16] = static_cast<short>(emulated::to_bfloat16(a[i]));
  }
  return out;
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 v) {
  __m256bh out;
  for (int i = 0; i < 16; ++i) out[i] = static_cast<short>(emulated::to_bfloat16(v[i]));
  return out;
}

// Integers.
EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _mm512_slli_epi32(__m512i v, unsigned count) { return (__m512i)((emulated::u32x16)v << count); }
EMULATED __m512i _mm512_srli_epi32(__m512i v, unsigned count) { return (__m512i)((emulated::u32x16)v >> count); }
EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return (__m512i)((emulated::u32x16)a + (emulated::u32x16)b);
}
EMULATED __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return (__m512i)((emulated::u32x16)a - (emulated::u32x16)b);
}
EMULATED __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l,
                                 int m, int n, int o, int p) {
  return (__m512i)emulated::i32x16{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 v) {
  const emulated::i32x16 from = (emulated::i32x16)index;
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = v[from[i] & 15];
  return out;
}
EMULATED __m512i _mm512_max_epu32(__m512i a, __m512i b) {
  const emulated::u32x16 x = (emulated::u32x16)a, y = (emulated::u32x16)b;
  return (__m512i)(x > y ? x : y);
}
EMULATED __m512i _mm512_max_epu16(__m512i a, __m512i b) {
  const emulated::u16x32 x = (emulated::u16x32)a, y = (emulated::u16x32)b;
  return (__m512i)(x > y ? x : y);
}
EMULATED unsigned _mm512_reduce_max_epu32(__m512i v) {
  const emulated::u32x16 x = (emulated::u32x16)v;
  unsigned most = 0;
  for (int i = 0; i < 16; ++i) most = x[i] > most ? x[i] : most;
  return most;
}
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) {
  std::uint16_t in[16];
  std::memcpy(in, &v, sizeof(in));
  emulated::u32x16 out;
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  return (__m512i)out;
}
// The lower byte of each.
EMULATED __m128i _mm512_cvtepi32_epi8(__m512i v) {
  const emulated::u32x16 x = (emulated::u32x16)v;
  std::uint8_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<std::uint8_t>(x[i]);
  return emulated::load<__m128i>(out);
}
// sums + four products of unsigned a and signed b, without saturation, modulo 2^32.
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  std::uint32_t out[16];
  std::uint8_t x[64];
  std::int8_t y[64];
  std::memcpy(out, &sums, sizeof(out));
  std::memcpy(x, &a, sizeof(x));
  std::memcpy(y, &b, sizeof(y));
  for (int i = 0; i < 64; ++i) out[i / 4] += static_cast<std::uint32_t>(std::int32_t{x[i]} * std::int32_t{y[i]});
  return emulated::load<__m512i>(out);
}

// Tiles.
EMULATED void _tile_loadconfig(const void* config) { emulated::tiles.configure(config); }
EMULATED void _tile_release() { emulated::tiles.release(); }
EMULATED void _tile_zero(int tile) { emulated::tiles.zero(tile); }
EMULATED void _tile_loadd(int tile, const void* base, long stride) { emulated::tiles.load(tile, base, stride); }
EMULATED void _tile_stream_loadd(int tile, const void* base, long stride) { emulated::tiles.load(tile, base, stride); }
EMULATED void _tile_stored(int tile, void* base, long stride) { emulated::tiles.store(tile, base, stride); }
EMULATED void _tile_dpbf16ps(int c, int a, int b) { emulated::tiles.multiply_bf16(c, a, b); }
EMULATED void _tile_dpbssd(int c, int a, int b) { emulated::tiles.multiply_int8(c, a, b); }
