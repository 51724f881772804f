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
typedef float __m256 __attribute__((vector_size(32), may_alias));
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

// The control and status register's flush-to-zero and denormals-are-zeros, of each thread; off at the start.
namespace emulated {
constexpr unsigned kInitialCsr = 0x1f80;
inline thread_local unsigned csr = kInitialCsr;

inline float in_csr(float value) { return (csr & 0x8040u) == 0x8040u ? flush(value) : value; }

template <typename Operation>
inline __m512 lanes(const Operation& operation) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = in_csr(operation(i));
  return out;
}
}  // namespace emulated

// Not inlined: a kernel unrolls hundreds of them, and the compiler would take a minute.
#define EMULATED __attribute__((noinline)) inline

// Loads, stores, constants.
EMULATED __m512 _mm512_loadu_ps(const void* p) { return emulated::load<__m512>(p); }
EMULATED __m512i _mm512_loadu_si512(const void* p) { return emulated::load<__m512i>(p); }
EMULATED __m256i _mm256_loadu_si256(const void* p) { return emulated::load<__m256i>(p); }
EMULATED __m256 _mm256_loadu_ps(const void* p) { return emulated::load<__m256>(p); }
EMULATED void _mm256_storeu_ps(void* p, __m256 v) { std::memcpy(p, &v, sizeof(v)); }
EMULATED __m256 _mm256_setzero_ps() { return __m256{}; }
EMULATED __m256i _mm256_set1_epi32(int value) {
  return __m256i{} + (static_cast<long long>(value) << 32 | static_cast<std::uint32_t>(value));
}
EMULATED __m512 _mm512_zextps256_ps512(__m256 v) { return __m512{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]}; }
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
inline unsigned _mm_getcsr() { return emulated::csr; }
inline void _mm_setcsr(unsigned value) { emulated::csr = value; }
EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) {
  return emulated::lanes([&](int i) { return emulated::in_csr(a[i]) + emulated::in_csr(b[i]); });
}
EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) {
  return emulated::lanes([&](int i) { return emulated::in_csr(a[i]) - emulated::in_csr(b[i]); });
}
EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  return emulated::lanes([&](int i) { return emulated::in_csr(a[i]) * emulated::in_csr(b[i]); });
}
EMULATED __m512 _mm512_div_ps(__m512 a, __m512 b) {
  return emulated::lanes([&](int i) { return emulated::in_csr(a[i]) / emulated::in_csr(b[i]); });
}
EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return emulated::lanes(
      [&](int i) { return std::fmaf(emulated::in_csr(a[i]), emulated::in_csr(b[i]), emulated::in_csr(c[i])); });
}
EMULATED __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) {
  return emulated::lanes(
      [&](int i) { return std::fmaf(emulated::in_csr(a[i]), emulated::in_csr(b[i]), -emulated::in_csr(c[i])); });
}
// b where either is NaN.
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return emulated::lanes([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
EMULATED __m512 _mm512_mask_mov_ps(__m512 source, __mmask16 mask, __m512 a) {
  for (int i = 0; i < 16; ++i) source[i] = mask >> i & 1 ? a[i] : source[i];
  return source;
}
EMULATED __m512 _mm512_mask_max_ps(__m512 source, __mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_mov_ps(source, mask, _mm512_max_ps(a, b));
}
EMULATED __m512 _mm512_maskz_mul_ps(__mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_mov_ps(__m512{}, mask, _mm512_mul_ps(a, b));
}
// Of all that the instruction can do, the one form that is used.
EMULATED __m512 _mm512_reduce_ps(__m512 v, int form) {
  if (form != 0x09) std::abort();
  return emulated::lanes([&](int i) { return emulated::past_floor(emulated::in_csr(v[i])); });
}
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return emulated::lanes([&](int i) { return emulated::scale(emulated::in_csr(a[i]), emulated::in_csr(b[i])); });
}
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_mov_ps(__m512{}, mask, _mm512_scalef_ps(a, b));
}
enum { _CMP_UNORD_Q = 3, _CMP_GT_OQ = 30 };
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int comparison) {
  if (comparison != _CMP_UNORD_Q && comparison != _CMP_GT_OQ) std::abort();
  int mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool holds = comparison == _CMP_GT_OQ ? a[i] > b[i] : std::isnan(a[i]) || std::isnan(b[i]);
    mask |= static_cast<int>(holds) << i;
  }
  return static_cast<__mmask16>(mask);
}
EMULATED __m512 _mm512_rcp14_ps(__m512 v) {
  return emulated::lanes([&](int i) { return emulated::reciprocal(emulated::in_csr(v[i])); });
}
// Halves are added until one is left, as g++ and clang expand it.
EMULATED float _mm512_reduce_add_ps(__m512 v) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] = emulated::in_csr(emulated::in_csr(v[i]) + emulated::in_csr(v[i + half]));
  }
  return v[0];
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

// Two multiply-adds, the odd elements' first; MXCSR is not asked: subnormal numbers are zeros throughout.
namespace emulated {
template <typename Sums, typename Pairs>
inline Sums add_pairs(Sums sums, Pairs a, Pairs b) {
  const auto element = [](Pairs v, int i) { return flush(from_bfloat16(static_cast<std::uint16_t>(v[i]))); };
  for (int i = 0; i < static_cast<int>(sizeof(Sums) / sizeof(float)); ++i) {
    const float odd = std::fmaf(element(a, 2 * i + 1), element(b, 2 * i + 1), flush(sums[i]));
    sums[i] = flush(std::fmaf(element(a, 2 * i), element(b, 2 * i), flush(odd)));
  }
  return sums;
}
}  // namespace emulated
EMULATED __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) { return emulated::add_pairs(sums, a, b); }
EMULATED __m256 _mm256_dpbf16_ps(__m256 sums, __m256bh a, __m256bh b) { return emulated::add_pairs(sums, a, b); }

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


// Words of 16 bits, comparisons, and what moves them about.
namespace emulated {
typedef std::int64_t i64x8 __attribute__((vector_size(64), may_alias));

template <typename Vector, typename Holds>
inline std::uint32_t mask_of(const Holds& holds) {
  std::uint32_t mask = 0;
  constexpr int kLanes = sizeof(Vector) / sizeof(Vector{}[0]);
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<std::uint32_t>(holds(i)) << i;
  return mask;
}

// In every quarter, the lower or upper half of a's elements and of b's, by turns.
template <typename Vector>
inline __m512i unpack(__m512i a, __m512i b, bool upper) {
  constexpr int kLanes = 16 / sizeof(Vector{}[0]);
  const Vector x = (Vector)a, y = (Vector)b;
  Vector out;
  for (int i = 0; i < 4 * kLanes; ++i) {
    const int from = i / kLanes * kLanes + (upper ? kLanes / 2 : 0) + i % kLanes / 2;
    out[i] = i % 2 == 0 ? x[from] : y[from];
  }
  return (__m512i)out;
}
}  // namespace emulated

EMULATED __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return emulated::unpack<emulated::u16x32>(a, b, false); }
EMULATED __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return emulated::unpack<emulated::u16x32>(a, b, true); }
EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return emulated::unpack<emulated::i32x16>(a, b, false); }
EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return emulated::unpack<emulated::i32x16>(a, b, true); }
EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return emulated::unpack<emulated::i64x8>(a, b, false); }
EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return emulated::unpack<emulated::i64x8>(a, b, true); }
EMULATED __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return (__m512i)((emulated::u16x32)a + (emulated::u16x32)b);
}
EMULATED __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
  emulated::u16x32 out = (emulated::u16x32)a;
  for (int i = 0; i < 32; ++i) out[i] = mask >> i & 1 ? ((emulated::u16x32)b)[i] : out[i];
  return (__m512i)out;
}
EMULATED __mmask16 _mm512_cmpgt_epi32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(emulated::mask_of<emulated::i32x16>(
      [&](int i) { return ((emulated::i32x16)a)[i] > ((emulated::i32x16)b)[i]; }));
}
EMULATED __mmask16 _mm512_cmpgt_epu32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(emulated::mask_of<emulated::u32x16>(
      [&](int i) { return ((emulated::u32x16)a)[i] > ((emulated::u32x16)b)[i]; }));
}
EMULATED __mmask32 _mm512_cmpgt_epu16_mask(__m512i a, __m512i b) {
  return emulated::mask_of<emulated::u16x32>(
      [&](int i) { return ((emulated::u16x32)a)[i] > ((emulated::u16x32)b)[i]; });
}
// Quarters: two of a, then two of b, two bits of `form` for each.
EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int form) {
  emulated::i64x8 out;
  for (int i = 0; i < 8; ++i) out[i] = (i < 4 ? a : b)[(form >> i / 2 * 2 & 3) * 2 + i % 2];
  return (__m512i)out;
}
EMULATED __m512i _mm512_castsi128_si512(__m128i v) { return __m512i{v[0], v[1], 0, 0, 0, 0, 0, 0}; }
EMULATED __m512i _mm512_inserti32x4(__m512i v, __m128i quarter, int index) {
  v[2 * index] = quarter[0];
  v[2 * index + 1] = quarter[1];
  return v;
}
EMULATED __m128i _mm_loadu_si128(const void* p) { return emulated::load<__m128i>(p); }
EMULATED __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* p) {
  __m128i v{};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) std::memcpy(reinterpret_cast<char*>(&v) + i, static_cast<const char*>(p) + i, 1);
  }
  return v;
}
EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
  __m512i v{};
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) std::memcpy(reinterpret_cast<char*>(&v) + 2 * i, static_cast<const char*>(p) + 2 * i, 2);
  }
  return v;
}
EMULATED __m512i _mm512_cvtepi8_epi32(__m128i v) {
  std::int8_t in[16];
  std::memcpy(in, &v, sizeof(in));
  emulated::i32x16 out;
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  return (__m512i)out;
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
