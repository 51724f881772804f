// Portable tiles: plain C++ that a compiler can vectorise for any machine, and that valgrind can follow.
#include <cstring>

#include "cpu/linear.h"

namespace antiphon::cpu {
namespace {

template <Storage kStorage>
inline void load_line(const char* line, float (&values)[kPanelColumns]) {
  if constexpr (kStorage == Storage::kFloat32) {
    std::memcpy(values, line, sizeof(values));
  } else {
    std::uint32_t pairs[kPanelColumns / 2];
    std::memcpy(pairs, line, sizeof(pairs));
    std::uint32_t bits[kPanelColumns];
    for (int i = 0; i < kPanelColumns / 2; ++i) {
      // The pair in memory order is (column i, column i + 8), and the machine is little-endian.
      bits[i] = pairs[i] << 16;
      bits[i + kPanelColumns / 2] = pairs[i] & 0xffff0000u;
    }
    std::memcpy(values, bits, sizeof(values));
  }
}

template <Storage kStorage, bool kPackedRows, int kRows>
void run_tile(const Tile& tile) {
  constexpr std::ptrdiff_t kLineBytes = kPanelColumns * static_cast<std::ptrdiff_t>(element_bytes(kStorage));
  float sums[kRows][kPanelColumns] = {};
  float line[kPanelColumns];
  for (std::ptrdiff_t k = 0; k < tile.num_k; ++k) {
    load_line<kStorage>(static_cast<const char*>(tile.b) + k * kLineBytes, line);
    for (int row = 0; row < kRows; ++row) {
      const float x = kPackedRows ? tile.a[k * kRows + row] : tile.a[row * tile.a_row_stride + k];
      for (int column = 0; column < kPanelColumns; ++column) sums[row][column] += x * line[column];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    float* c = tile.c + row * tile.c_row_stride;
    for (std::ptrdiff_t column = 0; column < tile.num_columns; ++column) {
      float sum = tile.accumulate ? c[column] + sums[row][column] : sums[row][column];
      if (tile.bias != nullptr) sum += tile.bias[column];
      if (tile.residual != nullptr) sum += tile.residual[row * tile.c_row_stride + column];
      c[column] = sum;
    }
  }
}

#define ANTIPHON_ROWS(storage, packed)                                                                      \
  {                                                                                                         \
    run_tile<storage, packed, 1>, run_tile<storage, packed, 2>, run_tile<storage, packed, 3>,               \
        run_tile<storage, packed, 4>, run_tile<storage, packed, 5>, run_tile<storage, packed, 6>            \
  }

}  // namespace

const TileTable kPortableTiles = {6, {
    {ANTIPHON_ROWS(Storage::kFloat32, false), ANTIPHON_ROWS(Storage::kFloat32, true)},
    {ANTIPHON_ROWS(Storage::kBfloat16, false), ANTIPHON_ROWS(Storage::kBfloat16, true)},
}};

}  // namespace antiphon::cpu
