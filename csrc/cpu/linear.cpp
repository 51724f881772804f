// Blocking and threads of the CPU linear kernel. Nothing here can change a bit of the result: see linear.h.
#include "cpu/linear.h"

#include <algorithm>
#include <cstring>

#include "cpu/bfloat16.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kChunkBytes = 6 << 20;   // packed x of one chunk: stays in a third-level cache
constexpr std::ptrdiff_t kCacheRows = 144;        // rows whose block of x (144 KiB) stays in a second-level cache
constexpr std::ptrdiff_t kMaxTaskPanels = 8;      // 8 panel blocks (128 KiB) stay there beside it
constexpr std::ptrdiff_t kTasksPerThread = 4;     // at least, where there is that much: the last ones end together
constexpr std::ptrdiff_t kStreamedPanels = 4;     // panels of a task that has few rows
constexpr std::ptrdiff_t kPackedRowBlocks = 4;    // row blocks of x that one task packs


// Where column `column` of a panel stands in a line of bfloat16.
std::ptrdiff_t bfloat16_place(std::ptrdiff_t column) {
  return column < kPanelColumns / 2 ? 2 * column : 2 * (column - kPanelColumns / 2) + 1;
}

void pack_panel(const float* rows, std::ptrdiff_t num_columns, std::ptrdiff_t num_k, Storage storage, void* panel) {
  if (storage == Storage::kFloat32) {
    float* out = static_cast<float*>(panel);
    for (std::ptrdiff_t k = 0; k < num_k; ++k) {
      for (std::ptrdiff_t column = 0; column < kPanelColumns; ++column) {
        out[k * kPanelColumns + column] = column < num_columns ? rows[column * num_k + k] : 0.0f;
      }
    }
    return;
  }
  std::uint16_t* out = static_cast<std::uint16_t*>(panel);
  for (std::ptrdiff_t k = 0; k < num_k; ++k) {
    for (std::ptrdiff_t column = 0; column < kPanelColumns; ++column) {
      out[k * kPanelColumns + bfloat16_place(column)] =
          column < num_columns ? round_to_bfloat16(rows[column * num_k + k]) : 0;
    }
  }
}

// One call's shapes, and the tile at (rows, panel, block of k).
struct Call {
  const TileTable& tiles;
  const PackedWeight& weight;
  const float* bias;
  const float* residual;
  float* y;

  std::ptrdiff_t num_panels() const { return ceil_div(weight.num_columns, kPanelColumns); }
  std::ptrdiff_t num_blocks() const { return std::max<std::ptrdiff_t>(1, ceil_div(weight.num_k, kBlockK)); }
  std::ptrdiff_t block_k(std::ptrdiff_t block) const { return std::min(kBlockK, weight.num_k - block * kBlockK); }

  const char* panel_block(std::ptrdiff_t panel, std::ptrdiff_t block) const {
    const std::ptrdiff_t line = panel * weight.num_k + block * kBlockK;
    return static_cast<const char*>(weight.data) + line * kPanelColumns * bytes();
  }

  std::ptrdiff_t bytes() const { return static_cast<std::ptrdiff_t>(element_bytes(weight.storage)); }

  void run(const float* a, bool packed, std::ptrdiff_t row, std::ptrdiff_t rows, std::ptrdiff_t panel,
           std::ptrdiff_t block, const char* prefetch, std::ptrdiff_t prefetch_bytes) const {
    Tile tile;
    tile.a = a;
    tile.a_row_stride = weight.num_k;
    tile.b = panel_block(panel, block);
    tile.num_k = block_k(block);
    const std::ptrdiff_t first = row * weight.num_columns + panel * kPanelColumns;
    const bool is_last = block + 1 == num_blocks();
    tile.c = y + first;
    tile.c_row_stride = weight.num_columns;
    tile.num_columns = std::min(kPanelColumns, weight.num_columns - panel * kPanelColumns);
    tile.accumulate = block > 0;
    tile.bias = bias != nullptr && is_last ? bias + panel * kPanelColumns : nullptr;
    tile.residual = residual != nullptr && is_last ? residual + first : nullptr;
    tile.prefetch = prefetch;
    tile.prefetch_bytes = prefetch_bytes;
    tiles.functions[static_cast<int>(weight.storage)][packed][rows - 1](tile);
  }
};

// Few rows: x is read where it lies, and each thread streams whole panels from memory, once.
void linear_few_rows(const Call& call, const float* x, std::ptrdiff_t num_rows) {
  const std::ptrdiff_t num_panels = call.num_panels();
  const std::ptrdiff_t num_blocks = call.num_blocks();
  parallel_for(ceil_div(num_panels, kStreamedPanels), [&](std::ptrdiff_t task, int) {
    const std::ptrdiff_t end_panel = std::min(num_panels, (task + 1) * kStreamedPanels);
    for (std::ptrdiff_t panel = task * kStreamedPanels; panel < end_panel; ++panel) {
      for (std::ptrdiff_t block = 0; block < num_blocks; ++block) {
        call.run(x + block * kBlockK, false, 0, num_rows, panel, block, nullptr, 0);
      }
    }
  });
}

// x of one chunk, packed so that it is read in one direction: [blocks of k][row blocks][k of the block][rows of it].
struct PackedChunk {
  float* data;
  std::ptrdiff_t num_rows;
  std::ptrdiff_t num_k;
  std::ptrdiff_t tile_rows;

  std::ptrdiff_t rows_at(std::ptrdiff_t row) const { return std::min(tile_rows, num_rows - row); }

  float* at(std::ptrdiff_t row, std::ptrdiff_t block) const {
    const std::ptrdiff_t first_k = block * kBlockK;
    return data + first_k * num_rows + row * std::min(kBlockK, num_k - first_k);
  }

  // Packs the row block that starts at `row` from x[num_rows, K].
  void pack(const float* x, std::ptrdiff_t row) const {
    const std::ptrdiff_t rows = rows_at(row);
    for (std::ptrdiff_t first_k = 0; first_k < num_k; first_k += kBlockK) {
      float* out = at(row, first_k / kBlockK);
      const std::ptrdiff_t end_k = std::min(num_k, first_k + kBlockK);
      for (std::ptrdiff_t k = first_k; k < end_k; ++k) {
        for (std::ptrdiff_t i = 0; i < rows; ++i) *out++ = x[(row + i) * num_k + k];
      }
    }
  }
};

// One task of many rows: rows that fit the second-level cache x some panels. Loops, outermost first: blocks of k,
// panels (their block in the first-level cache), row blocks. Chunk rows [begin_row, end_row) x panels [begin_panel,
// end_panel).
struct TaskRange {
  std::ptrdiff_t begin_row, end_row, begin_panel, end_panel;
};

void run_range(const Call& call, const PackedChunk& chunk, std::ptrdiff_t first_row, const TaskRange& range) {
  const std::ptrdiff_t num_row_blocks = ceil_div(range.end_row - range.begin_row, chunk.tile_rows);
  for (std::ptrdiff_t block = 0; block < call.num_blocks(); ++block) {
    const std::ptrdiff_t block_bytes = call.block_k(block) * kPanelColumns * call.bytes();
    const std::ptrdiff_t share = ceil_div(ceil_div(block_bytes, num_row_blocks), 128) * 128;
    for (std::ptrdiff_t panel = range.begin_panel; panel < range.end_panel; ++panel) {
      const char* next = panel + 1 < range.end_panel ? call.panel_block(panel + 1, block) : nullptr;
      for (std::ptrdiff_t row = range.begin_row; row < range.end_row; row += chunk.tile_rows) {
        call.run(chunk.at(row, block), true, first_row + row, chunk.rows_at(row), panel, block, next,
                 next != nullptr ? share : 0);
        if (next != nullptr) next += share;
      }
    }
  }
}

void linear_chunk(const Call& call, const PackedChunk& chunk, const float* x, std::ptrdiff_t first_row) {
  const std::ptrdiff_t num_row_blocks = ceil_div(chunk.num_rows, chunk.tile_rows);
  parallel_for(ceil_div(num_row_blocks, kPackedRowBlocks), [&](std::ptrdiff_t task, int) {
    const std::ptrdiff_t end_block = std::min(num_row_blocks, (task + 1) * kPackedRowBlocks);
    for (std::ptrdiff_t row_block = task * kPackedRowBlocks; row_block < end_block; ++row_block) {
      chunk.pack(x + first_row * chunk.num_k, row_block * chunk.tile_rows);
    }
  });
  const std::ptrdiff_t num_panels = call.num_panels();
  const std::ptrdiff_t num_spans = ceil_div(chunk.num_rows, kCacheRows);
  const std::ptrdiff_t enough = ceil_div(num_panels * num_spans, kTasksPerThread * num_threads());
  const std::ptrdiff_t task_panels = std::min(kMaxTaskPanels, enough);
  // Neighbouring tasks have the same panels: the threads then read them from memory once.
  parallel_for(num_spans * ceil_div(num_panels, task_panels), [&](std::ptrdiff_t task, int) {
    TaskRange range;
    range.begin_row = task % num_spans * kCacheRows;
    range.end_row = std::min(chunk.num_rows, range.begin_row + kCacheRows);
    range.begin_panel = task / num_spans * task_panels;
    range.end_panel = std::min(num_panels, range.begin_panel + task_panels);
    run_range(call, chunk, first_row, range);
  });
}

void linear_many_rows(const Call& call, const float* x, std::ptrdiff_t num_rows) {
  const std::ptrdiff_t num_k = call.weight.num_k;
  const std::ptrdiff_t fitting = kChunkBytes / (4 * num_k) / kCacheRows * kCacheRows;
  const std::ptrdiff_t chunk_rows = std::min(num_rows, std::max(kCacheRows, fitting));
  thread_local Workspace workspace;
  float* packed = workspace.at_least<float>(chunk_rows * num_k);
  for (std::ptrdiff_t first_row = 0; first_row < num_rows; first_row += chunk_rows) {
    const std::ptrdiff_t rows = std::min(chunk_rows, num_rows - first_row);
    linear_chunk(call, PackedChunk{packed, rows, num_k, call.tiles.max_rows}, x, first_row);
  }
}

}  // namespace

void pack_rows(const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t num_k,
               Storage storage, void* packed) {
  const std::ptrdiff_t panel_bytes = kPanelColumns * num_k * static_cast<std::ptrdiff_t>(element_bytes(storage));
  parallel_for(ceil_div(num_rows, kPanelColumns), [&](std::ptrdiff_t task, int) {
    const std::ptrdiff_t row = task * kPanelColumns;
    char* panel = static_cast<char*>(packed) + (first_row + row) / kPanelColumns * panel_bytes;
    pack_panel(rows + row * num_k, std::min(kPanelColumns, num_rows - row), num_k, storage, panel);
  });
}

void linear(const TileTable& tiles, const PackedWeight& weight, const float* bias, const float* residual,
            const float* x, std::ptrdiff_t num_rows, float* y) {
  const Call call{tiles, weight, bias, residual, y};
  if (num_rows <= tiles.max_rows) {
    if (num_rows > 0) linear_few_rows(call, x, num_rows);
  } else {
    linear_many_rows(call, x, num_rows);
  }
}

}  // namespace antiphon::cpu
