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
// A product is made of three parts:
//   Tiles    multiply<kRowTiles>()                one step in tile registers (amx_tiles.h)
//   Source   row(row) -> Row                      what is to be known of a row of x before it is packed
//            pack(row, Row, step, line)           64 bytes of it: one step of k
//   Sink     fetch<kRows>(row, column)            prefetches what write will write
//            write<kRows>(row, column, sums)      16 + 16 sums of some rows of a tile from `column` on, to y: the left
//                                                 ones at `sums`, the right ones a tile further, rows a line apart
// Rows are numbered as the caller numbers them.
#pragma once

#include <cstring>

#include "cpu/amx_tiles.h"
#include "cpu/pool.h"
#include "cpu/workspace.h"

namespace antiphon::cpu::amx {

constexpr std::ptrdiff_t kInnerSteps = 14;  // a panel's block of 28 KiB
constexpr std::ptrdiff_t kOuterSteps = 28;
constexpr std::ptrdiff_t kChunkRows = 512;          // x of 28 steps: 0.9 MiB
constexpr std::ptrdiff_t kChunkRowsLongK = 256;     // half of it, and room for the sums of all panels of a task
constexpr std::ptrdiff_t kInPlaceBytes = 64 << 10;  // packing less of x costs less than waking a thread
constexpr std::ptrdiff_t kPackedSteps = 4;          // of a row at a time: whole lines of x, and tiles soon filled
constexpr std::ptrdiff_t kMaxPanelsPerTask = 4;
constexpr std::ptrdiff_t kMaxPanelsPerTaskLongK = 32;  // each task reads x of a block from the third-level cache once

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
  bool long_k() const { return outer_steps < num_steps; }
  bool one_block() const { return inner_steps >= num_steps; }
  std::ptrdiff_t chunk_rows(std::ptrdiff_t num_rows) const {
    return std::min(num_rows, long_k() ? kChunkRowsLongK : kChunkRows);
  }
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
  char* line(std::ptrdiff_t row, std::ptrdiff_t step) const {
    const std::ptrdiff_t tile = row / kTileLines;
    return at(tile / 2, step) + tile % 2 * tile_bytes() + row % kTileLines * kLineBytes;
  }

  static std::ptrdiff_t bytes(std::ptrdiff_t num_rows, std::ptrdiff_t num_steps) {
    return ceil_div(num_rows, kTileLines) * kTileBytes * num_steps;
  }

  template <typename Source>
  ANTIPHON_AMX void pack_tile(const Source& source, std::ptrdiff_t tile) const {
    const std::ptrdiff_t first = tile * kTileLines;
    const std::ptrdiff_t rows = std::min(num_rows - first, kTileLines);
    typename Source::Row row[kTileLines];
    for (std::ptrdiff_t i = 0; i < rows; ++i) row[i] = source.row(first_row + first + i);
    for (std::ptrdiff_t begin = 0; begin < num_steps; begin += kPackedSteps) {
      const std::ptrdiff_t end = std::min(num_steps, begin + kPackedSteps);
      for (std::ptrdiff_t i = 0; i < rows; ++i) {
        for (std::ptrdiff_t step = begin; step < end; ++step) {
          source.pack(first_row + first + i, row[i], step, line(first + i, step));
        }
      }
    }
    if (first + rows == num_rows) clear_padding();
  }

  // The lines of the last tile that no row fills.
  void clear_padding() const {
    const std::ptrdiff_t padding = num_tiles() * tile_rows() - num_rows;
    for (std::ptrdiff_t step = 0; step < num_steps && padding > 0; ++step) {
      std::memset(line(num_rows, step), 0, static_cast<std::size_t>(padding * kLineBytes));
    }
  }

  // Every line, by all threads where that pays.
  template <typename Source>
  void pack(const Source& source) const {
    if (bytes(num_rows, num_steps) <= kInPlaceBytes) {
      for (std::ptrdiff_t tile = 0; tile < num_tiles(); ++tile) pack_tile(source, tile);
    } else {
      parallel_for(num_tiles(), [&](std::ptrdiff_t tile, int) { pack_tile(source, tile); });
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
template <typename Tiles, typename Sink>
class Task {
 public:
  Task(const Sink& sink, const Chunk& chunk, const char* weight, const StepPlan& plan, std::ptrdiff_t first_panel,
       std::ptrdiff_t end_panel, std::ptrdiff_t guess)
      : chunk_(chunk), weight_(weight), place_{plan, first_panel, end_panel, first_panel, 0}, guess_(guess),
        rows_(sink) {}

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
    rows_.write_from(0);
    _tile_release();
    _mm_sfence();  // for stores past the caches
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
    if (place_.last()) {
      const std::ptrdiff_t row = row_block * kBlockRows;
      rows_.begin(block.sums, chunk_.first_row + row, std::min(kBlockRows, chunk_.num_rows - row),
                  place_.panel * kPanelColumns);
    }
    if (chunk_.tiles_in(row_block) == 2) {
      run_block<Tiles, Sink, 2>(block, rows_, prefetch_);
    } else {
      run_block<Tiles, Sink, 1>(block, rows_, prefetch_);
    }
    if (place_.last()) rows_.end();
  }

  const Chunk& chunk_;
  const char* weight_;
  Place place_;
  std::ptrdiff_t guess_;
  Rows<Sink> rows_;
  Prefetch prefetch_;
  char* kept_ = nullptr;      // sums between blocks of steps: [panel][row block]
  char* finished_ = nullptr;  // a block's sums until they are in y: before the next block's sums leave its tiles
};

// All columns of a chunk's rows, x being packed.
template <typename Tiles, typename Sink>
void multiply_chunk(const Sink& sink, const Chunk& chunk, const void* weight, const StepPlan& plan,
                    std::ptrdiff_t num_panels) {
  const std::ptrdiff_t threads = num_threads();
  const std::ptrdiff_t per_task = std::clamp<std::ptrdiff_t>(
      ceil_div(num_panels, (plan.long_k() ? 1 : 4) * threads), 1,
      plan.long_k() ? kMaxPanelsPerTaskLongK : kMaxPanelsPerTask);
  parallel_for(ceil_div(num_panels, per_task), [&](std::ptrdiff_t index, int) {
    const std::ptrdiff_t first = index * per_task;
    const std::ptrdiff_t likely = first + threads * per_task;
    Task<Tiles, Sink>(sink, chunk, static_cast<const char*>(weight), plan, first,
                      std::min(num_panels, first + per_task), likely < num_panels ? likely : -1)
        .run();
  });
}

// y = x @ weight^T, for num_rows >= 1.
template <typename Tiles, typename Source, typename Sink>
void run_product(const Source& source, const Sink& sink, const void* weight, const Shape& shape) {
  const StepPlan plan(shape.num_steps);
  const std::ptrdiff_t chunk_rows = plan.chunk_rows(shape.num_rows);
  thread_local Workspace workspace;
  char* x = workspace.at_least<char>(Chunk::bytes(chunk_rows, shape.num_steps));
  for (std::ptrdiff_t row = 0; row < shape.num_rows; row += chunk_rows) {
    const Chunk chunk{x, row, std::min(chunk_rows, shape.num_rows - row), shape.num_steps};
    chunk.pack(source);
    multiply_chunk<Tiles>(sink, chunk, weight, plan, shape.num_panels());
  }
}

}  // namespace antiphon::cpu::amx
