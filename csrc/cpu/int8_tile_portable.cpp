// The portable int8 form, and what is the same for all forms with int16 activations.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/int8_pairs.h"
#include "cpu/int8_scale.h"

namespace antiphon::cpu {

void pack_pair_panel(const std::int8_t* rows, std::ptrdiff_t num_columns, std::ptrdiff_t num_k, void* panel) {
  char* out = static_cast<char*>(panel);
  const std::ptrdiff_t num_pairs = (num_k + 1) / 2;
  if (num_columns < kPairColumns) std::memset(out, 0, static_cast<std::size_t>(num_pairs * kPairColumns * 2));
  for (std::ptrdiff_t pair = 0; pair < num_k / 2; ++pair) {
    for (std::ptrdiff_t column = 0; column < num_columns; ++column) {
      std::memcpy(out + (pair * kPairColumns + column) * 2, rows + column * num_k + 2 * pair, 2);
    }
  }
  if (num_k % 2 == 0) return;
  for (std::ptrdiff_t column = 0; column < num_columns; ++column) {
    out[(num_k / 2 * kPairColumns + column) * 2] = static_cast<char>(rows[column * num_k + num_k - 1]);
    out[(num_k / 2 * kPairColumns + column) * 2 + 1] = 0;
  }
}

void pack_pair_rows(AbsmaxFunction absmax, QuantizeFunction quantize, const float* x, std::ptrdiff_t num_rows,
                    std::ptrdiff_t num_k, std::int32_t levels, void* row_block, float* scales) {
  constexpr std::ptrdiff_t kPiece = 512;  // quantised here, then spread to the rows' places
  std::int16_t piece[kPiece];
  std::int32_t* out = static_cast<std::int32_t*>(row_block);
  for (std::ptrdiff_t row = 0; row < num_rows; ++row) {
    const float* values = x + row * num_k;
    const RowScale scale = scale_of(absmax(values, num_k), levels);
    scales[row] = scale.scale;
    for (std::ptrdiff_t first = 0; first < num_k; first += kPiece) {
      const std::ptrdiff_t count = std::min(kPiece, num_k - first);
      if (scale.inverse == 0.0f) {
        std::memset(piece, 0, sizeof(piece));
      } else {
        quantize(values + first, count, scale.inverse, piece);
        if (count % 2 == 1) piece[count] = 0;
      }
      std::int32_t* target = out + first / 2 * num_rows + row;
      for (std::ptrdiff_t pair = 0; pair < (count + 1) / 2; ++pair) {
        std::memcpy(target + pair * num_rows, piece + 2 * pair, sizeof(std::int32_t));
      }
    }
  }
}

namespace {

std::uint32_t absmax(const float* x, std::ptrdiff_t num_k) {
  std::uint32_t largest = 0;
  for (std::ptrdiff_t k = 0; k < num_k; ++k) {
    largest = std::max(largest, bits_of(x[k]) & 0x7fffffffu);
  }
  return largest;
}

void quantize(const float* x, std::ptrdiff_t count, float inverse, std::int16_t* out) {
  for (std::ptrdiff_t i = 0; i < count; ++i) out[i] = static_cast<std::int16_t>(std::nearbyint(x[i] * inverse));
}

void pack_rows(const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t num_k, std::int32_t levels, void* row_block,
               float* scales) {
  pack_pair_rows(absmax, quantize, x, num_rows, num_k, levels, row_block, scales);
}

void finish(const Int8Tile& tile, std::ptrdiff_t row, const std::int32_t (&sums)[kPairColumns]) {
  for (std::ptrdiff_t column = 0; column < tile.num_columns; ++column) {
    const std::ptrdiff_t place = row * tile.y_row_stride + column;
    float value = static_cast<float>(sums[column]) * (tile.x_scales[row] * tile.w_scales[column]);
    if (tile.bias != nullptr) value += tile.bias[column];
    if (tile.residual != nullptr) value += tile.residual[place];
    tile.y[place] = value;
  }
}

void run_tile(const Int8Tile& tile) {
  const std::int16_t* a = static_cast<const std::int16_t*>(tile.a);
  const std::int8_t* b = static_cast<const std::int8_t*>(tile.b);
  for (std::ptrdiff_t row = 0; row < tile.num_rows; ++row) {
    std::int32_t sums[kPairColumns] = {};
    if (!tile.first) std::memcpy(sums, tile.sums + row * kPairColumns, sizeof(sums));
    for (std::ptrdiff_t pair = 0; pair < tile.num_k / 2; ++pair) {
      const std::int16_t* x = a + (pair * tile.num_rows + row) * 2;
      const std::int8_t* line = b + pair * kPairColumns * 2;
      for (std::ptrdiff_t column = 0; column < kPairColumns; ++column) {
        sums[column] += x[0] * line[2 * column] + x[1] * line[2 * column + 1];
      }
    }
    if (tile.last) {
      finish(tile, row, sums);
    } else {
      std::memcpy(tile.sums + row * kPairColumns, sums, sizeof(sums));
    }
  }
}

}  // namespace

const Int8Form kPortableInt8Form = {
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
