// The AVX2 int8 form: vpmaddwd on int16 activations and weights widened to int16, the sums of a tile in registers.
//
// A step of two k is 12 vpmaddwd and 12 vpaddd for what float32 does in 24 vfmadd. On Zen 3 all else hides behind them:
// in registers alone they take 7.6 cycles (additions also go to the two pipes that multiply), in this loop 7.8.
#if defined(__x86_64__)
#include <cstring>

#include "cpu/avx2.h"
#include "cpu/int8_pairs.h"

namespace antiphon::cpu {
namespace {

ANTIPHON_AVX2 std::uint32_t absmax(const float* x, std::ptrdiff_t num_k) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest[4] = {};
  std::ptrdiff_t k = 0;
  for (; k + 32 <= num_k; k += 32) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k + 8 * i));
      largest[i] = _mm256_max_epu32(largest[i], _mm256_and_si256(bits, magnitude));
    }
  }
  alignas(32) std::uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_max_epu32(_mm256_max_epu32(largest[0], largest[1]),
                                                                         _mm256_max_epu32(largest[2], largest[3])));
  std::uint32_t result = 0;
  for (std::uint32_t lane : lanes) result = lane > result ? lane : result;
  for (; k < num_k; ++k) {
    std::uint32_t bits;
    std::memcpy(&bits, x + k, sizeof(bits));
    bits &= 0x7fffffffu;
    result = bits > result ? bits : result;
  }
  return result;
}

ANTIPHON_AVX2 void quantize(const float* x, std::ptrdiff_t count, float inverse, std::int16_t* out) {
  const __m256 factor = _mm256_set1_ps(inverse);
  std::ptrdiff_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factor));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), words);
  }
  for (; i < count; ++i) out[i] = static_cast<std::int16_t>(_mm_cvtss_si32(_mm_set_ss(x[i] * inverse)));
}

void pack_rows(const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t num_k, std::int32_t levels, void* row_block,
               float* scales) {
  pack_pair_rows(absmax, quantize, x, num_rows, num_k, levels, row_block, scales);
}

template <int kRows>
ANTIPHON_AVX2_INLINE void finish(const Int8Tile& tile, const __m256i (&sums)[kRows][2]) {
  // The last panel may be narrow: its scales and bias are read, and y is written, through padded copies.
  const bool whole = tile.num_columns == kPairColumns;
  const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(tile.num_columns);
  alignas(32) float scales[kPairColumns] = {};
  alignas(32) float bias[kPairColumns] = {};
  alignas(32) float residual[kPairColumns] = {};
  alignas(32) float padded[kPairColumns];
  std::memcpy(scales, tile.w_scales, bytes);
  if (tile.bias != nullptr) std::memcpy(bias, tile.bias, bytes);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    float* y = tile.y + row * tile.y_row_stride;
    float* target = whole ? y : padded;
    const float* added = tile.residual == nullptr ? nullptr : tile.residual + row * tile.y_row_stride;
    if (added != nullptr && !whole) added = static_cast<const float*>(std::memcpy(residual, added, bytes));
    const __m256 x_scale = _mm256_set1_ps(tile.x_scales[row]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = _mm256_mul_ps(x_scale, _mm256_load_ps(scales + 8 * half));
      __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[row][half]), scale);
      if (tile.bias != nullptr) value = _mm256_add_ps(value, _mm256_load_ps(bias + 8 * half));
      if (added != nullptr) value = _mm256_add_ps(value, _mm256_loadu_ps(added + 8 * half));
      _mm256_storeu_ps(target + 8 * half, value);
    }
    if (!whole) std::memcpy(y, padded, bytes);
  }
}

// One line of a panel, a pair of k for 8 columns, as int16. Widening here costs nothing: it goes to two pipes (FP1 and
// FP2 of Zen 3) that vpmaddwd does not use.
ANTIPHON_AVX2_INLINE __m256i load_line(const char* line) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line)));
}

// low_sum += pairs of x * low, high_sum alike. As intrinsics, g++ 12 reorders the additions and spills most sums.
ANTIPHON_AVX2_INLINE void multiply_add(__m256i& low_sum, __m256i& high_sum, const std::int32_t* x, const __m256i& low,
                                       const __m256i& high) {
  __m256i pair, product;
  asm("vpbroadcastd %[x], %[pair]\n\t"
      "vpmaddwd %[low], %[pair], %[product]\n\t"
      "vpmaddwd %[high], %[pair], %[pair]\n\t"
      "vpaddd %[product], %[low_sum], %[low_sum]\n\t"
      "vpaddd %[pair], %[high_sum], %[high_sum]"
      : [low_sum] "+x"(low_sum), [high_sum] "+x"(high_sum), [pair] "=&x"(pair), [product] "=&x"(product)
      : [x] "m"(*x), [low] "x"(low), [high] "x"(high));
}

template <int kRows>
ANTIPHON_AVX2 void run_rows(const Int8Tile& tile) {
  constexpr std::ptrdiff_t kLineBytes = kPairColumns * 2;
  __m256i sums[kRows][2];
  __m256i* kept = reinterpret_cast<__m256i*>(tile.sums);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    sums[row][0] = tile.first ? _mm256_setzero_si256() : _mm256_load_si256(kept + 2 * row);
    sums[row][1] = tile.first ? _mm256_setzero_si256() : _mm256_load_si256(kept + 2 * row + 1);
    // y's lines are a row apart, where no hardware prefetcher sees them coming.
    if (tile.last) __builtin_prefetch(tile.y + row * tile.y_row_stride, 1);
  }
  const char* prefetch = tile.prefetch;
  const char* prefetch_end = tile.prefetch + tile.prefetch_bytes;

  const char* b = static_cast<const char*>(tile.b);
  const std::int32_t* a = static_cast<const std::int32_t*>(tile.a);
  auto step = [&](std::ptrdiff_t pair) ANTIPHON_AVX2 __attribute__((always_inline)) {
    const __m256i low = load_line(b + pair * kLineBytes);
    const __m256i high = load_line(b + pair * kLineBytes + kPairColumns);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      multiply_add(sums[row][0], sums[row][1], a + pair * kRows + row, low, high);
    }
  };
  std::ptrdiff_t left = tile.num_k / 2;
  for (; left >= 4; left -= 4) {
    if (prefetch < prefetch_end) {
      _mm_prefetch(prefetch, _MM_HINT_T0);
      _mm_prefetch(prefetch + 64, _MM_HINT_T0);
      prefetch += 128;
    }
    step(0);
    step(1);
    step(2);
    step(3);
    b += 4 * kLineBytes;
    a += 4 * kRows;
  }
  for (std::ptrdiff_t pair = 0; pair < left; ++pair) step(pair);
  if (tile.last) {
    finish<kRows>(tile, sums);
    return;
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    _mm256_store_si256(kept + 2 * row, sums[row][0]);
    _mm256_store_si256(kept + 2 * row + 1, sums[row][1]);
  }
}

void run_tile(const Int8Tile& tile) {
  switch (tile.num_rows) {
    case 1: return run_rows<1>(tile);
    case 2: return run_rows<2>(tile);
    case 3: return run_rows<3>(tile);
    case 4: return run_rows<4>(tile);
    case 5: return run_rows<5>(tile);
    default: return run_rows<6>(tile);
  }
}

}  // namespace

const Int8Form kAvx2Int8Form = {
    kPairColumns,
    kPairRows,
    /*k_multiple=*/2,
    kPairBlockK,
    /*activation_bytes=*/2,
    /*panel_extra_bytes=*/0,
    kPairMaxLevels,
    pack_pair_panel,
    pack_rows,
    run_tile,
};

}  // namespace antiphon::cpu
#endif
