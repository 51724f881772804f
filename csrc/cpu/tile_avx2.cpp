// AVX2 + FMA tiles: the sums of a tile stay in registers over a whole block of k.
#if defined(__x86_64__)
#include <cstring>

#include "cpu/avx2.h"
#include "cpu/linear.h"

namespace antiphon::cpu {
namespace {

// One line of a panel, widened to float32: columns 0-7 and 8-15.
template <Storage kStorage>
ANTIPHON_AVX2_INLINE void load_line(const char* line, __m256& low, __m256& high) {
  if constexpr (kStorage == Storage::kFloat32) {
    low = _mm256_loadu_ps(reinterpret_cast<const float*>(line));
    high = _mm256_loadu_ps(reinterpret_cast<const float*>(line) + 8);
  } else {
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    low = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
    high = _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
}

// sums += values[0, num_columns), of which none past the end is read.
ANTIPHON_AVX2_INLINE void add_columns(const float* values, std::ptrdiff_t num_columns, __m256& low,
                                      __m256& high) {
  alignas(32) float padded[kPanelColumns] = {};
  if (num_columns < kPanelColumns) {
    std::memcpy(padded, values, sizeof(float) * static_cast<std::size_t>(num_columns));
    values = padded;
  }
  low = _mm256_add_ps(low, _mm256_loadu_ps(values));
  high = _mm256_add_ps(high, _mm256_loadu_ps(values + 8));
}

template <int kRows>
ANTIPHON_AVX2_INLINE void store(const Tile& tile, const __m256 (&sums)[kRows][2]) {
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    float* c = tile.c + row * tile.c_row_stride;
    __m256 low = sums[row][0];
    __m256 high = sums[row][1];
    if (tile.accumulate) add_columns(c, tile.num_columns, low, high);
    if (tile.bias != nullptr) add_columns(tile.bias, tile.num_columns, low, high);
    if (tile.residual != nullptr) add_columns(tile.residual + row * tile.c_row_stride, tile.num_columns, low, high);
    if (tile.num_columns == kPanelColumns) {
      _mm256_storeu_ps(c, low);
      _mm256_storeu_ps(c + 8, high);
    } else {
      alignas(32) float padded[kPanelColumns];
      _mm256_store_ps(padded, low);
      _mm256_store_ps(padded + 8, high);
      std::memcpy(c, padded, sizeof(float) * static_cast<std::size_t>(tile.num_columns));
    }
  }
}

template <Storage kStorage, bool kPackedRows, int kRows>
ANTIPHON_AVX2 void run_tile(const Tile& tile) {
  constexpr std::ptrdiff_t kLineBytes = kPanelColumns * static_cast<std::ptrdiff_t>(element_bytes(kStorage));
  __m256 sums[kRows][2];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = _mm256_setzero_ps();

  // y's lines are a row apart, where no hardware prefetcher sees them coming.
  for (int row = 0; row < kRows; ++row) {
    __builtin_prefetch(tile.c + row * tile.c_row_stride, 1);
    __builtin_prefetch(tile.c + row * tile.c_row_stride + tile.num_columns - 1, 1);
  }
  const char* prefetch = tile.prefetch;
  const char* prefetch_end = tile.prefetch + tile.prefetch_bytes;

  const char* b = static_cast<const char*>(tile.b);
  const float* a = tile.a;
  const std::ptrdiff_t stride = tile.a_row_stride;
  auto step = [&](std::ptrdiff_t k) ANTIPHON_AVX2 __attribute__((always_inline)) {
    __m256 low, high;
    load_line<kStorage>(b + k * kLineBytes, low, high);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const __m256 x = _mm256_broadcast_ss(kPackedRows ? a + k * kRows + row : a + row * stride + k);
      multiply_add(sums[row][0], x, low);
      multiply_add(sums[row][1], x, high);
    }
  };
  std::ptrdiff_t left = tile.num_k;
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
    a += kPackedRows ? 4 * kRows : 4;
  }
  for (std::ptrdiff_t k = 0; k < left; ++k) step(k);
  store<kRows>(tile, sums);
}

#define ANTIPHON_ROWS(storage, packed)                                                                      \
  {                                                                                                         \
    run_tile<storage, packed, 1>, run_tile<storage, packed, 2>, run_tile<storage, packed, 3>,               \
        run_tile<storage, packed, 4>, run_tile<storage, packed, 5>, run_tile<storage, packed, 6>            \
  }

}  // namespace

const TileTable kAvx2Tiles = {6, {
    {ANTIPHON_ROWS(Storage::kFloat32, false), ANTIPHON_ROWS(Storage::kFloat32, true)},
    {ANTIPHON_ROWS(Storage::kBfloat16, false), ANTIPHON_ROWS(Storage::kBfloat16, true)},
}};

}  // namespace antiphon::cpu
#endif
