// AVX-512 tiles: 12 rows x 16 columns of sums in registers over a whole block of k. The sums of tile_avx2.cpp, to the
// bit: one multiply-add for each k, ascending.
#if defined(__x86_64__)
#include "cpu/avx512.h"
#include "cpu/linear.h"

namespace antiphon::cpu {
namespace {

// One line of a panel, widened to float32. A line of bfloat16 stays in its packed order of columns: 0, 8, 1, 9, ...
template <Storage kStorage>
ANTIPHON_AVX512 ANTIPHON_INLINE __m512 load_line(const char* line) {
  if constexpr (kStorage == Storage::kFloat32) {
    return _mm512_loadu_ps(line);
  } else {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
}

template <Storage kStorage, int kRows>
ANTIPHON_AVX512 ANTIPHON_INLINE void store(const Tile& tile, const __m512 (&sums)[kRows]) {
  const __mmask16 columns = first_lanes(tile.num_columns);
  const __m512 bias = tile.bias != nullptr ? _mm512_maskz_loadu_ps(columns, tile.bias) : _mm512_setzero_ps();
  const __m512i packed_order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  ANTIPHON_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    float* c = tile.c + row * tile.c_row_stride;
    __m512 sum = sums[row];
    if constexpr (kStorage == Storage::kBfloat16) sum = _mm512_permutexvar_ps(packed_order, sum);
    if (tile.accumulate) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(columns, c), sum);
    if (tile.bias != nullptr) sum = _mm512_add_ps(sum, bias);
    if (tile.residual != nullptr) {
      sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(columns, tile.residual + row * tile.c_row_stride));
    }
    _mm512_mask_storeu_ps(c, columns, sum);
  }
}

template <Storage kStorage, bool kPackedRows, int kRows>
ANTIPHON_AVX512 void run_tile(const Tile& tile) {
  constexpr std::ptrdiff_t kLineBytes = kPanelColumns * static_cast<std::ptrdiff_t>(element_bytes(kStorage));
  __m512 sums[kRows];
  ANTIPHON_UNROLL(12)
  for (int row = 0; row < kRows; ++row) sums[row] = _mm512_setzero_ps();

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
  auto step = [&](std::ptrdiff_t k) ANTIPHON_AVX512 __attribute__((always_inline)) {
    const __m512 line = load_line<kStorage>(b + k * kLineBytes);
    ANTIPHON_UNROLL(12)
    for (int row = 0; row < kRows; ++row) {
      const __m512 x = _mm512_set1_ps(kPackedRows ? a[k * kRows + row] : a[row * stride + k]);
      sums[row] = _mm512_fmadd_ps(x, line, sums[row]);
    }
  };
  std::ptrdiff_t left = tile.num_k;
  for (; left >= 4; left -= 4) {
    if (prefetch < prefetch_end) {
      __builtin_prefetch(prefetch);
      __builtin_prefetch(prefetch + 64);
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
  store<kStorage, kRows>(tile, sums);
}

#define ANTIPHON_ROWS(storage, packed)                                                              \
  {                                                                                                 \
    run_tile<storage, packed, 1>, run_tile<storage, packed, 2>, run_tile<storage, packed, 3>,       \
        run_tile<storage, packed, 4>, run_tile<storage, packed, 5>, run_tile<storage, packed, 6>,   \
        run_tile<storage, packed, 7>, run_tile<storage, packed, 8>, run_tile<storage, packed, 9>,   \
        run_tile<storage, packed, 10>, run_tile<storage, packed, 11>, run_tile<storage, packed, 12> \
  }

}  // namespace

const TileTable kAvx512Tiles = {12, {
    {ANTIPHON_ROWS(Storage::kFloat32, false), ANTIPHON_ROWS(Storage::kFloat32, true)},
    {ANTIPHON_ROWS(Storage::kBfloat16, false), ANTIPHON_ROWS(Storage::kBfloat16, true)},
}};

}  // namespace antiphon::cpu
#endif
