// Blocking and threads of a product on AMX tiles, the same for bfloat16 and int8. Nothing here can change a bit of the
// result: the sums of an element are carried in float32 (or int32) through its steps of k in ascending order, in tile
// registers and, between blocks, in memory.
//
// Loops, outermost first, with what stays where:
//   chunks of rows      packed x of a chunk: third-level cache
//   outer blocks of k   packed x of a chunk and a block: second-level cache
//   panels of a task    their sums, when there are several blocks: second-level cache
//   inner blocks of k   the panel's block: first-level cache
//   row blocks          x as a stream, sums in tile registers
//
// A Product has:
//   pack_row(row, line, step_bytes)               one row of x: 64 bytes for each step, step_bytes apart
//   multiply<kRowTiles>()                         one step in tile registers (amx_tiles.h)
//   write_row(row, column, left, right)           16 + 16 sums of a row from `column` on, to y
#pragma once

#include <cstring>

#include "cpu/amx_tiles.h"
#include "cpu/pool.h"
#include "cpu/workspace.h"

namespace antiphon::cpu::amx {

constexpr std::ptrdiff_t kInnerSteps = 14;  // a panel's block of 28 KiB
constexpr std::ptrdiff_t kOuterSteps = 28;
constexpr std::ptrdiff_t kChunkRows = 1024;      // x of 28 steps: 1.75 MiB
constexpr std::ptrdiff_t kChunkRowsLongK = 512;  // half of it, and room for the sums of several panels
constexpr std::ptrdiff_t kInPlaceBytes = 64 << 10;  // packing less of x costs less than waking a thread
constexpr std::ptrdiff_t kMaxPanelsPerTask = 4;
constexpr std::ptrdiff_t kMaxPanelsPerTaskLongK = 8;  // each reads x of a block from the third-level cache once

struct Shape {
  std::ptrdiff_t num_rows;
  std::ptrdiff_t num_columns;
  std::ptrdiff_t num_steps;  // 1 or more

  std::ptrdiff_t num_panels() const { return ceil_div(num_columns, kPanelColumns); }
};

// K cut into outer blocks of nearly equal size, each into inner ones.
struct StepPlan {
  std::ptrdiff_t num_steps, outer_steps, inner_steps;

  explicit StepPlan(std::ptrdiff_t steps) : num_steps(steps) {
    outer_steps = ceil_div(steps, ceil_div(steps, kOuterSteps));
    inner_steps = ceil_div(outer_steps, ceil_div(outer_steps, kInnerSteps));
  }
  std::ptrdiff_t num_outer() const { return ceil_div(num_steps, outer_steps); }
  bool one_block() const { return inner_steps >= num_steps; }
};

// Packed x of some rows.
struct Chunk {
  char* x;
  std::ptrdiff_t first_row;
  std::ptrdiff_t num_rows;
  std::ptrdiff_t num_steps;

  // Fewer rows than a tile has lines are not padded; otherwise the last tile is.
  std::ptrdiff_t tile_rows() const { return std::min(num_rows, kTileLines); }
  std::ptrdiff_t tile_bytes() const { return tile_rows() * kLineBytes; }
  std::ptrdiff_t num_tiles() const { return ceil_div(num_rows, kTileLines); }
  std::ptrdiff_t num_blocks() const { return ceil_div(num_rows, kBlockRows); }
  std::ptrdiff_t tiles_in(std::ptrdiff_t block) const { return std::min<std::ptrdiff_t>(2, num_tiles() - 2 * block); }

  char* at(std::ptrdiff_t block, std::ptrdiff_t step) const {
    return x + (2 * block * num_steps + tiles_in(block) * step) * tile_bytes();
  }

  static std::ptrdiff_t bytes(std::ptrdiff_t num_rows, std::ptrdiff_t num_steps) {
    return ceil_div(num_rows, kTileLines) * kTileBytes * num_steps;
  }

  template <typename Product>
  void pack(const Product& product, std::ptrdiff_t tile) const {
    const std::ptrdiff_t step_bytes = tiles_in(tile / 2) * tile_bytes();
    char* lines = at(tile / 2, 0) + tile % 2 * tile_bytes();
    for (std::ptrdiff_t row = 0; row < tile_rows(); ++row) {
      char* line = lines + row * kLineBytes;
      if (tile * kTileLines + row < num_rows) {
        product.pack_row(first_row + tile * kTileLines + row, line, step_bytes);
      } else {
        for (std::ptrdiff_t step = 0; step < num_steps; ++step) std::memset(line + step * step_bytes, 0, kLineBytes);
      }
    }
  }
};

// Where a task is: one panel's block of steps. Ascending in steps for each panel.
struct Place {
  const StepPlan& plan;
  std::ptrdiff_t first_panel, end_panel;
  std::ptrdiff_t panel, step;

  std::ptrdiff_t outer_end() const {
    return std::min(plan.num_steps, (step / plan.outer_steps + 1) * plan.outer_steps);
  }
  std::ptrdiff_t num_steps() const { return std::min(plan.inner_steps, outer_end() - step); }
  bool done() const { return step >= plan.num_steps; }
  bool first() const { return step == 0; }
  bool last() const { return step + num_steps() >= plan.num_steps; }

  Place next() const {
    Place place{plan, first_panel, end_panel, panel, step + num_steps()};
    if (place.step < outer_end()) return place;  // the next inner block
    place.panel = panel + 1;
    if (place.panel < end_panel) {
      place.step = step / plan.outer_steps * plan.outer_steps;
    } else {
      place.panel = first_panel;
    }
    return place;
  }
};

// One task: some panels x all rows of a chunk. `guess` is a panel that this thread may well take next.
template <typename Product>
class Task {
 public:
  Task(const Product& product, const Chunk& chunk, const char* weight, const StepPlan& plan, std::ptrdiff_t first_panel,
       std::ptrdiff_t end_panel, std::ptrdiff_t guess)
      : chunk_(chunk), weight_(weight), place_{plan, first_panel, end_panel, first_panel, 0}, guess_(guess),
        pending_(product) {}

  ANTIPHON_AMX void run() {
    thread_local Workspace workspace;
    const StepPlan& plan = place_.plan;
    const std::ptrdiff_t kept = plan.one_block() ? 0 : (place_.end_panel - place_.first_panel) * chunk_.num_blocks();
    finished_ = workspace.at_least<char>((1 + kept) * kSumsBytes);
    kept_ = finished_ + kSumsBytes;
    load_config(chunk_.tile_rows());
    while (!place_.done()) {
      const Place next = place_.next();
      prefetch_from(next);
      for (std::ptrdiff_t block = 0; block < chunk_.num_blocks(); ++block) run_rows(block);
      place_.panel = next.panel;
      place_.step = next.step;
    }
    pending_.write_rest();
    _tile_release();
  }

 private:
  const char* weight_at(std::ptrdiff_t panel, std::ptrdiff_t step) const {
    return weight_ + (panel * place_.plan.num_steps + step) * kPanelStepBytes;
  }

  // The next block of the weight, in equal shares beside the steps of this one.
  void prefetch_from(const Place& next) {
    prefetch_ = Prefetch{};
    if (next.done() && guess_ < 0) return;
    const std::ptrdiff_t bytes = kPanelStepBytes * (next.done() ? place_.plan.inner_steps : next.num_steps());
    prefetch_.next = next.done() ? weight_at(guess_, 0) : weight_at(next.panel, next.step);
    prefetch_.end = prefetch_.next + bytes;
    prefetch_.lines_per_step = ceil_div(bytes / kLineBytes, chunk_.num_blocks() * place_.num_steps());
  }

  ANTIPHON_AMX void run_rows(std::ptrdiff_t row_block) {
    char* kept = kept_ + ((place_.panel - place_.first_panel) * chunk_.num_blocks() + row_block) * kSumsBytes;
    Block block;
    block.x = chunk_.at(row_block, place_.step);
    block.x_tile_bytes = chunk_.tile_bytes();
    block.weight = weight_at(place_.panel, place_.step);
    block.num_steps = place_.num_steps();
    block.sums_before = place_.first() ? nullptr : kept;
    block.sums = place_.last() ? finished_ : kept;
    if (chunk_.tiles_in(row_block) == 2) {
      run_block<Product, 2>(block, pending_, prefetch_);
    } else {
      run_block<Product, 1>(block, pending_, prefetch_);
    }
    if (!place_.last()) return;
    const std::ptrdiff_t row = row_block * kBlockRows;
    pending_.set(finished_, chunk_.first_row + row, std::min(kBlockRows, chunk_.num_rows - row),
                 place_.panel * kPanelColumns);
  }

  const Chunk& chunk_;
  const char* weight_;
  Place place_;
  std::ptrdiff_t guess_;
  PendingRows<Product> pending_;
  Prefetch prefetch_;
  char* kept_ = nullptr;      // sums between blocks of steps: [panel][row block]
  char* finished_ = nullptr;  // a block's sums until they are in y: before the next block's sums leave its tiles
};

// y = x @ weight^T by `product`, for num_rows >= 1.
template <typename Product>
void run_product(const Product& product, const void* weight, const Shape& shape) {
  const StepPlan plan(shape.num_steps);
  const bool long_k = plan.num_outer() > 1;
  const std::ptrdiff_t num_panels = shape.num_panels();
  const std::ptrdiff_t threads = num_threads();
  const std::ptrdiff_t per_task = std::clamp<std::ptrdiff_t>(
      ceil_div(num_panels, (long_k ? 2 : 4) * threads), 1, long_k ? kMaxPanelsPerTaskLongK : kMaxPanelsPerTask);
  const std::ptrdiff_t chunk_rows = std::min(shape.num_rows, long_k ? kChunkRowsLongK : kChunkRows);
  thread_local Workspace workspace;
  char* x = workspace.at_least<char>(Chunk::bytes(chunk_rows, shape.num_steps));
  for (std::ptrdiff_t row = 0; row < shape.num_rows; row += chunk_rows) {
    const Chunk chunk{x, row, std::min(chunk_rows, shape.num_rows - row), shape.num_steps};
    if (Chunk::bytes(chunk.num_rows, chunk.num_steps) <= kInPlaceBytes) {
      for (std::ptrdiff_t tile = 0; tile < chunk.num_tiles(); ++tile) chunk.pack(product, tile);
    } else {
      parallel_for(chunk.num_tiles(), [&](std::ptrdiff_t tile, int) { chunk.pack(product, tile); });
    }
    parallel_for(ceil_div(num_panels, per_task), [&](std::ptrdiff_t index, int) {
      const std::ptrdiff_t first = index * per_task;
      const std::ptrdiff_t likely = first + threads * per_task;
      Task<Product>(product, chunk, static_cast<const char*>(weight), plan, first,
                    std::min(num_panels, first + per_task), likely < num_panels ? likely : -1)
          .run();
    });
  }
}

}  // namespace antiphon::cpu::amx
