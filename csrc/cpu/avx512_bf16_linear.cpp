// The linear kernel on AVX-512 BF16: see avx512_bf16_linear.h for the numbers.
//
// Loops, outermost first, with what stays where:
//   chunks of rows     packed x of a chunk: third-level cache
//   tasks              a span of rows x some panels
//   blocks of k        x of the span and the block, and between blocks the task's sums in y: second-level cache
//   panels             the panel's block: second-level cache
//   row blocks         up to 12 rows x 32 columns of sums in registers
#if defined(__x86_64__)
#include "cpu/avx512_bf16_linear.h"

#include <algorithm>

#include "cpu/amx_sinks.h"
#include "cpu/avx512.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "cpu/transpose_words.h"
#include "cpu/workspace.h"

namespace antiphon::cpu {
namespace {

constexpr std::ptrdiff_t kMaxTileRows = 12;
constexpr std::ptrdiff_t kStepPairs = kAmxBf16StepK / 2;
constexpr std::ptrdiff_t kStepLines = amx::kPanelStepBytes / amx::kLineBytes;
constexpr std::ptrdiff_t kMaxBlockSteps = 64;       // of k: a panel's block is 128 KiB at most
constexpr std::ptrdiff_t kSpanBytes = 448 << 10;    // of packed x, of a block of k
constexpr std::ptrdiff_t kChunkBytes = 8 << 20;     // of packed x
constexpr std::ptrdiff_t kInPlaceBytes = 64 << 10;  // packing less of x costs less than waking a thread
constexpr std::ptrdiff_t kMaxTaskPanels = 8;
constexpr std::ptrdiff_t kTasksPerThread = 8;       // at least, where there is that much: the last ones end together

// 32 values rounded to bfloat16, or the first `count` of them and zeros.
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE __m512i bf16_line(const float* values, std::ptrdiff_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(first_lanes(count), values);
  const __m512 high = _mm512_maskz_loadu_ps(first_lanes(count - 16), values + std::min<std::ptrdiff_t>(16, count));
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// x of some rows in bfloat16: [blocks of rows][pairs of k][rows of the block][2].
struct PackedRows {
  std::uint32_t* pairs;
  std::ptrdiff_t first_row;
  std::ptrdiff_t num_rows;
  std::ptrdiff_t num_steps;

  std::ptrdiff_t num_blocks() const { return ceil_div(num_rows, kMaxTileRows); }
  // 16 rows are 8 + 8, not 12 + 4.
  std::ptrdiff_t block_rows() const { return ceil_div(num_rows, num_blocks()); }
  std::ptrdiff_t row_of(std::ptrdiff_t block) const { return first_row + block * block_rows(); }
  std::ptrdiff_t rows_in(std::ptrdiff_t block) const {
    return std::min(block_rows(), num_rows - block * block_rows());
  }
  std::uint32_t* at(std::ptrdiff_t block, std::ptrdiff_t step) const {
    return pairs + (block * block_rows() * num_steps + step * rows_in(block)) * kStepPairs;
  }
  static std::ptrdiff_t row_bytes(std::ptrdiff_t num_steps) { return 2 * kAmxBf16StepK * num_steps; }

  ANTIPHON_AVX512_BF16 void pack_block(const float* x, std::ptrdiff_t num_k, std::ptrdiff_t block) const {
    const std::ptrdiff_t rows = rows_in(block);
    std::uint32_t* out = at(block, 0);
    for (std::ptrdiff_t k = 0; k < num_k; k += kAmxBf16StepK) {
      __m512i lines[16];
      for (std::ptrdiff_t row = 0; row < 16; ++row) {
        lines[row] = row < rows ? bf16_line(x + (row_of(block) + row) * num_k + k, num_k - k)
                                : _mm512_setzero_si512();
      }
      transpose_words(lines);
      ANTIPHON_UNROLL(16)
      for (int pair = 0; pair < kStepPairs; ++pair, out += rows) {
        _mm512_mask_storeu_ps(out, first_lanes(rows), _mm512_castsi512_ps(lines[pair]));
      }
    }
  }

  void pack(const float* x, std::ptrdiff_t num_k) const {
    if (num_rows * row_bytes(num_steps) <= kInPlaceBytes) {
      for (std::ptrdiff_t block = 0; block < num_blocks(); ++block) pack_block(x, num_k, block);
    } else {
      parallel_for(num_blocks(), [&](std::ptrdiff_t block, int) { pack_block(x, num_k, block); });
    }
  }
};

// Up to 12 rows x one panel x one block of k.
struct Tile {
  const std::uint32_t* x;  // [pairs of k][rows]
  const char* weight;      // [steps][2 halves][16 pairs][16 columns][2]
  std::ptrdiff_t num_steps;
  std::ptrdiff_t row;
  std::ptrdiff_t column;
  bool first;  // sums start from 0, else from y
  bool last;   // they are finished, else they are kept in y
  const char* next;  // lines of the panel after this one, to be fetched on the way: so many beside each step
  std::ptrdiff_t next_lines;
};

template <int kRows>
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE void load_sums(const Tile& tile, const amx::FloatSums& sink,
                                                    __m512 (&sums)[kRows][2]) {
  ANTIPHON_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    ANTIPHON_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      const std::ptrdiff_t column = std::min(tile.column + 16 * half, sink.num_columns);
      sums[row][half] = tile.first ? _mm512_setzero_ps()
                                   : _mm512_maskz_loadu_ps(first_lanes(sink.num_columns - column),
                                                           sink.y + (tile.row + row) * sink.num_columns + column);
    }
  }
}

template <int kRows>
ANTIPHON_AVX512_BF16 ANTIPHON_INLINE void store_sums(const Tile& tile, const amx::FloatSums& sink,
                                                     const __m512 (&sums)[kRows][2]) {
  ANTIPHON_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    ANTIPHON_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      const std::ptrdiff_t column = tile.column + 16 * half;
      if (column >= sink.num_columns) continue;
      if (tile.last) {
        sink.write_half(tile.row + row, column, sums[row][half]);
      } else {
        _mm512_mask_storeu_ps(sink.y + (tile.row + row) * sink.num_columns + column,
                              first_lanes(sink.num_columns - column), sums[row][half]);
      }
    }
  }
}

template <int kRows>
ANTIPHON_AVX512_BF16 void run_tile(const Tile& tile, const amx::FloatSums& sink) {
  __m512 sums[kRows][2];
  load_sums<kRows>(tile, sink, sums);
  const std::uint32_t* x = tile.x;
  const char* weight = tile.weight;
  amx::Prefetch prefetch{tile.next, tile.next_lines};
  for (std::ptrdiff_t step = 0; step < tile.num_steps; ++step, weight += amx::kPanelStepBytes) {
    prefetch.step();
    for (std::ptrdiff_t pair = 0; pair < kStepPairs; pair += 4) {
      ANTIPHON_UNROLL(4)
      for (int i = 0; i < 4; ++i, x += kRows) {
        const char* line = weight + (pair + i) * amx::kLineBytes;
        const __m512bh left = (__m512bh)_mm512_loadu_si512(line);
        const __m512bh right = (__m512bh)_mm512_loadu_si512(line + amx::kTileBytes);
        ANTIPHON_UNROLL(12)
        for (int row = 0; row < kRows; ++row) {
          const __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[row]));
          sums[row][0] = _mm512_dpbf16_ps(sums[row][0], both, left);
          sums[row][1] = _mm512_dpbf16_ps(sums[row][1], both, right);
        }
      }
    }
  }
  store_sums<kRows>(tile, sink, sums);
}

using TileFunction = void (*)(const Tile&, const amx::FloatSums&);
constexpr TileFunction kTiles[kMaxTileRows] = {run_tile<1>, run_tile<2>,  run_tile<3>,  run_tile<4>,
                                             run_tile<5>, run_tile<6>,  run_tile<7>,  run_tile<8>,
                                             run_tile<9>, run_tile<10>, run_tile<11>, run_tile<12>};

// What one thread takes on at a time.
struct Task {
  std::ptrdiff_t first_block, end_block;  // of rows
  std::ptrdiff_t first_panel, end_panel;
  std::ptrdiff_t block_steps;
  std::ptrdiff_t next_panel;  // that this thread may well take on after these
};

void run_task(const amx::FloatSums& sink, const PackedRows& x, const char* weight, const Task& task) {
  for (std::ptrdiff_t step = 0; step < x.num_steps; step += task.block_steps) {
    Tile tile;
    tile.num_steps = std::min(task.block_steps, x.num_steps - step);
    tile.first = step == 0;
    tile.last = step + tile.num_steps == x.num_steps;
    for (std::ptrdiff_t panel = task.first_panel; panel < task.end_panel; ++panel) {
      tile.weight = weight + (panel * x.num_steps + step) * amx::kPanelStepBytes;
      tile.column = panel * kAmxPanelColumns;
      const std::ptrdiff_t next_panel = panel + 1 < task.end_panel ? panel + 1 : task.next_panel;
      const char* next = weight + (next_panel * x.num_steps + step) * amx::kPanelStepBytes;
      tile.next_lines = ceil_div(kStepLines, task.end_block - task.first_block);
      for (std::ptrdiff_t block = task.first_block; block < task.end_block; ++block) {
        tile.x = x.at(block, step);
        tile.row = x.row_of(block);
        tile.next = next + (block - task.first_block) * tile.num_steps * tile.next_lines * amx::kLineBytes;
        kTiles[x.rows_in(block) - 1](tile, sink);
      }
    }
  }
  _mm_sfence();  // for stores past the caches
}

// All columns of a chunk's rows, x being packed.
void multiply_chunk(const amx::FloatSums& sink, const PackedRows& x, const char* weight) {
  const std::ptrdiff_t num_panels = ceil_div(sink.num_columns, kAmxPanelColumns);
  const std::ptrdiff_t block_steps = ceil_div(x.num_steps, ceil_div(x.num_steps, kMaxBlockSteps));
  const std::ptrdiff_t fitting = kSpanBytes / (x.block_rows() * PackedRows::row_bytes(block_steps));
  const std::ptrdiff_t num_spans = ceil_div(x.num_blocks(), fitting);
  const std::ptrdiff_t span_blocks = ceil_div(x.num_blocks(), num_spans);
  const std::ptrdiff_t enough = ceil_div(num_panels * num_spans, kTasksPerThread * num_threads());
  const std::ptrdiff_t task_panels = std::min(kMaxTaskPanels, enough);
  // Neighbouring tasks have the same panels: the threads then read them from memory once.
  parallel_for(num_spans * ceil_div(num_panels, task_panels), [&](std::ptrdiff_t index, int) {
    const std::ptrdiff_t block = index % num_spans * span_blocks, panel = index / num_spans * task_panels;
    run_task(sink, x, weight,
             {block, std::min(x.num_blocks(), block + span_blocks), panel, std::min(num_panels, panel + task_panels),
              block_steps, std::min(num_panels - 1, panel + num_threads() * task_panels)});
  });
}

}  // namespace

void avx512_bf16_linear(const AmxBf16Weight& weight, const float* bias, const float* residual, const float* x,
                        std::ptrdiff_t num_rows, float* y) {
  if (num_rows == 0) return;
  const amx::FloatSums sink{bias, residual, y, weight.num_columns, {y, num_rows, weight.num_columns}};
  const std::ptrdiff_t num_steps = ceil_div(weight.num_k, kAmxBf16StepK);
  const std::ptrdiff_t row_bytes = PackedRows::row_bytes(num_steps);
  const std::ptrdiff_t chunk_rows = std::max(kMaxTileRows, kChunkBytes / row_bytes / kMaxTileRows * kMaxTileRows);
  thread_local Workspace workspace;
  std::uint32_t* pairs = workspace.at_least<std::uint32_t>(std::min(num_rows, chunk_rows) * row_bytes / 4);
  for (std::ptrdiff_t row = 0; row < num_rows; row += chunk_rows) {
    const PackedRows packed{pairs, row, std::min(chunk_rows, num_rows - row), num_steps};
    packed.pack(x, weight.num_k);
    multiply_chunk(sink, packed, static_cast<const char*>(weight.data));
  }
}

}  // namespace antiphon::cpu
#endif
