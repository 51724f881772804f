// See rotation.h. Both work on a tile [size][width]: `width` vectors beside each other, a row having width 1.
#include "cpu/rotation.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/hadamard.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kTileColumns = 64;   // of a second-level cache's size at the usual numbers of rows
constexpr std::ptrdiff_t kTaskRows = 16;

// A tile of x, whose lines are `stride` apart.
struct Tile {
  float* x;
  std::ptrdiff_t stride;
  std::ptrdiff_t width;
};

// tile[size][width] = x under its signs.
void load(const Rotation& rotation, const Tile& from, float* tile) {
  for (std::ptrdiff_t k = 0; k < rotation.size; ++k) {
    const float sign = rotation.signs == nullptr ? 1.0f : rotation.signs[k];
    for (std::ptrdiff_t i = 0; i < from.width; ++i) tile[k * from.width + i] = from.x[k * from.stride + i] * sign;
  }
}

void transform(const Rotation& rotation, float* tile, std::ptrdiff_t width) {
  if (width == 1) return hadamard<Lanes4>(tile, rotation.size, rotation.block);
  const float scale = 1.0f / std::sqrt(static_cast<float>(rotation.block));
  const std::ptrdiff_t values = rotation.size * width;
  for (std::ptrdiff_t h = rotation.block / 2; h > 0; h /= 2) hadamard_step(tile, values, h * width);
  for (std::ptrdiff_t i = 0; i < values; ++i) tile[i] *= scale;
}

// Line k of x from lines k, k + block, ... of the tile.
void mix_line(const Rotation& rotation, const float* tile, const Tile& to, std::ptrdiff_t line) {
  const std::ptrdiff_t a = rotation.num_blocks();
  const std::ptrdiff_t column = line / rotation.block;
  const std::ptrdiff_t within = line % rotation.block;
  float* out = to.x + line * to.stride;
  std::memset(out, 0, sizeof(float) * static_cast<std::size_t>(to.width));
  for (std::ptrdiff_t i = 0; i < a; ++i) {
    const float factor = rotation.mix[i * a + column];
    const float* from = tile + (i * rotation.block + within) * to.width;
    for (std::ptrdiff_t k = 0; k < to.width; ++k) out[k] += factor * from[k];
  }
}

void store(const Rotation& rotation, const float* tile, const Tile& to) {
  if (rotation.mix != nullptr) {
    for (std::ptrdiff_t line = 0; line < rotation.size; ++line) mix_line(rotation, tile, to, line);
    return;
  }
  for (std::ptrdiff_t line = 0; line < rotation.size; ++line) {
    std::memcpy(to.x + line * to.stride, tile + line * to.width, sizeof(float) * static_cast<std::size_t>(to.width));
  }
}

void rotate_row(const Rotation& rotation, float* row, float* tile) {
  std::memcpy(tile, row, sizeof(float) * static_cast<std::size_t>(rotation.size));
  for (std::ptrdiff_t k = 0; k < rotation.size && rotation.signs != nullptr; ++k) tile[k] *= rotation.signs[k];
  transform(rotation, tile, 1);
  if (rotation.mix == nullptr) {
    std::memcpy(row, tile, sizeof(float) * static_cast<std::size_t>(rotation.size));
    return;
  }
  // A whole block of the row is a line of blocks.
  const Rotation blocks{nullptr, rotation.mix, rotation.num_blocks(), 1};
  store(blocks, tile, {row, rotation.block, rotation.block});
}

}  // namespace

void rotate_rows(const Rotation& rotation, float* x, std::ptrdiff_t num_rows) {
  parallel_for(ceil_div(num_rows, kTaskRows), [&](std::ptrdiff_t task, int) {
    thread_local Workspace workspace;
    float* tile = workspace.at_least<float>(rotation.size);
    for (std::ptrdiff_t row = task * kTaskRows; row < std::min(num_rows, (task + 1) * kTaskRows); ++row) {
      rotate_row(rotation, x + row * rotation.size, tile);
    }
  });
}

void rotate_columns(const Rotation& rotation, float* x, std::ptrdiff_t num_columns) {
  parallel_for(ceil_div(num_columns, kTileColumns), [&](std::ptrdiff_t task, int) {
    thread_local Workspace workspace;
    float* tile = workspace.at_least<float>(rotation.size * kTileColumns);
    const std::ptrdiff_t first = task * kTileColumns;
    const Tile columns{x + first, num_columns, std::min(kTileColumns, num_columns - first)};
    load(rotation, columns, tile);
    transform(rotation, tile, columns.width);
    store(rotation, tile, columns);
  });
}

}  // namespace antiphon::cpu
