// The AVX-512 int8 form: vpdpbusd, four k at a time, on the activations of 127 levels that the AMX form has too, so
// that both give the same bits. The instruction takes unsigned activations: they are stored with 128 added, and 128
// times the sum of a column's weights is taken off its sums at the end (all modulo 2^32, so a sum may wrap between).
//
//   panel      [K / 4][32 columns][4] int8, then 128 x the sums of the 32 columns, int32
//   row block  [K / 4][rows][4] uint8, 1 to 12 rows
#if defined(__x86_64__)
#include <algorithm>
#include <utility>

#include "cpu/int8_avx512.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kColumns = 32;
constexpr std::ptrdiff_t kRows = 12;  // 12 x 32 sums are 24 of the 32 registers
constexpr std::ptrdiff_t kGroupK = 4;
constexpr std::ptrdiff_t kBlockK = 512;  // a panel's block is 16 KiB: half of a first-level cache
constexpr std::int32_t kOffset = 128;
constexpr std::ptrdiff_t kLineBytes = kColumns * kGroupK;

void pack_panel(const std::int8_t* rows, std::ptrdiff_t num_columns, std::ptrdiff_t num_k, void* panel) {
  std::int8_t* out = static_cast<std::int8_t*>(panel);
  std::int32_t offsets[kColumns] = {};
  for (std::ptrdiff_t k = 0; k < num_k; k += kGroupK) {
    for (std::ptrdiff_t column = 0; column < kColumns; ++column) {
      for (std::ptrdiff_t i = k; i < k + kGroupK; ++i) {
        const std::int8_t value = column < num_columns && i < num_k ? rows[column * num_k + i] : std::int8_t{0};
        offsets[column] += kOffset * value;  // at most 128 x 127 x kMaxInt8LinearK
        *out++ = value;
      }
    }
  }
  std::memcpy(out, offsets, sizeof(offsets));
}

// Each row four k at a time, in lines of all rows. Past K any value will do, since the weights are zeros there.
ANTIPHON_AVX512 void pack_rows(const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t num_k, std::int32_t levels,
                               void* row_block, float* scales) {
  const __m512i offset = _mm512_set1_epi32(kOffset);
  const PlainRows rows{x, num_k};
  for (std::ptrdiff_t row = 0; row < num_rows; ++row) {
    const float* values = rows.row(row);
    const RowScale scale = row_scale(rows, values, levels);
    scales[row] = scale.scale;
    char* out = static_cast<char*>(row_block) + row * kGroupK;
    for (std::ptrdiff_t k = 0; k < num_k; k += 16) {
      char bytes[16];
      const __m512i q = _mm512_add_epi32(quantize(rows, values, k, scale.inverse), offset);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(q));
      for (std::ptrdiff_t i = 0; i < std::min<std::ptrdiff_t>(16, num_k - k); i += kGroupK) {
        std::memcpy(out, bytes + i, kGroupK);
        out += num_rows * kGroupK;
      }
    }
  }
}

template <int kTileRows>
ANTIPHON_AVX512 ANTIPHON_INLINE void finish(const Int8Tile& tile, const __m512i (&sums)[kTileRows][2]) {
  ANTIPHON_UNROLL(2)
  for (int half = 0; half < 2; ++half) {
    const std::ptrdiff_t column = 16 * half;
    const __mmask16 lanes = first_lanes(tile.num_columns - column);
    if (lanes == 0) return;
    const __m512i offsets = _mm512_loadu_si512(static_cast<const char*>(tile.panel_extra) + 4 * column);
    ANTIPHON_UNROLL(12)
    for (int row = 0; row < kTileRows; ++row) {
      const std::ptrdiff_t place = row * tile.y_row_stride + column;
      const Int8Columns at{tile.w_scales + column, tile.bias == nullptr ? nullptr : tile.bias + column,
                           tile.residual == nullptr ? nullptr : tile.residual + place};
      const __m512i exact = _mm512_sub_epi32(sums[row][half], offsets);
      _mm512_mask_storeu_ps(tile.y + place, lanes, scaled_int8_sums(exact, tile.x_scales[row], at, lanes));
    }
  }
}

template <int kTileRows>
ANTIPHON_AVX512 void run_rows(const Int8Tile& tile) {
  __m512i sums[kTileRows][2];
  ANTIPHON_UNROLL(12)
  for (int row = 0; row < kTileRows; ++row) {
    sums[row][0] = tile.first ? _mm512_setzero_si512() : _mm512_loadu_si512(tile.sums + row * kColumns);
    sums[row][1] = tile.first ? _mm512_setzero_si512() : _mm512_loadu_si512(tile.sums + row * kColumns + 16);
    // y's lines are a row apart, where no hardware prefetcher sees them coming.
    if (tile.last) __builtin_prefetch(tile.y + row * tile.y_row_stride, 1);
  }
  const char* prefetch = tile.prefetch;
  const char* prefetch_end = tile.prefetch + tile.prefetch_bytes;
  const char* b = static_cast<const char*>(tile.b);
  const char* a = static_cast<const char*>(tile.a);
  for (std::ptrdiff_t k = 0; k < tile.num_k; k += kGroupK) {
    if (prefetch < prefetch_end) {
      __builtin_prefetch(prefetch);
      prefetch += 64;
    }
    const __m512i left = _mm512_loadu_si512(b);
    const __m512i right = _mm512_loadu_si512(b + 64);
    ANTIPHON_UNROLL(12)
    for (int row = 0; row < kTileRows; ++row) {
      std::int32_t four;
      std::memcpy(&four, a + row * kGroupK, sizeof(four));
      const __m512i x = _mm512_set1_epi32(four);
      sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], x, left);
      sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], x, right);
    }
    b += kLineBytes;
    a += kTileRows * kGroupK;
  }
  if (tile.last) {
    finish<kTileRows>(tile, sums);
    return;
  }
  ANTIPHON_UNROLL(12)
  for (int row = 0; row < kTileRows; ++row) {
    _mm512_storeu_si512(tile.sums + row * kColumns, sums[row][0]);
    _mm512_storeu_si512(tile.sums + row * kColumns + 16, sums[row][1]);
  }
}

template <int... kRow>
void run_tile(const Int8Tile& tile, std::integer_sequence<int, kRow...>) {
  static constexpr void (*kFunctions[])(const Int8Tile&) = {run_rows<kRow + 1>...};
  kFunctions[tile.num_rows - 1](tile);
}

void run_tile(const Int8Tile& tile) { run_tile(tile, std::make_integer_sequence<int, kRows>()); }

}  // namespace

const Int8Form kAvx512Int8Form = {
    kColumns,
    kRows,
    kGroupK,
    kBlockK,
    /*activation_bytes=*/1,
    /*panel_extra_bytes=*/kColumns * 4,
    kByteLevels,
    pack_panel,
    pack_rows,
    run_tile,
    /*product=*/nullptr,
};

}  // namespace antiphon::cpu
#endif
