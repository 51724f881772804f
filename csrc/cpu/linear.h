// The CPU linear kernel: y[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]) (+ residual[M, N]), all float32 but the weight,
// which is packed once.
//
// Packed weight: panels of 16 output columns, [ceil(N / 16)][K][16], float32 or bfloat16; missing columns are zeros.
//   float32   element j of a line is column j of the panel
//   bfloat16  element 2 i is column i, element 2 i + 1 is column i + 8, so that a shift and a mask widen a whole line
//
// Order of summation, the same for every element of y, whatever M, its row, the threads and the blocking:
//   block b covers k in [256 b, 256 (b + 1)); s_b is summed from 0 in ascending k, by one chain of multiply-adds
//   y = (((s_0 + s_1) + s_2) + ... + bias) + residual
#pragma once

#include <cstddef>
#include <cstdint>

namespace antiphon::cpu {

constexpr std::ptrdiff_t kPanelColumns = 16;
constexpr std::ptrdiff_t kBlockK = 256;      // one panel block in float32 is 16 KiB: half of a first-level cache
constexpr std::ptrdiff_t kMaxTileRows = 12;  // of any form

enum class Storage { kFloat32, kBfloat16 };

constexpr std::size_t element_bytes(Storage storage) { return storage == Storage::kFloat32 ? 4 : 2; }

// One tile: up to max_rows rows x 16 columns x one block of k.
struct Tile {
  const float* a;           // rows of x: [rows][a_row_stride], or packed [num_k][rows]
  std::ptrdiff_t a_row_stride;
  const void* b;            // panel block [num_k][16]
  std::ptrdiff_t num_k;
  float* c;                 // first element of the tile in y
  std::ptrdiff_t c_row_stride;
  std::ptrdiff_t num_columns;  // 1..16: columns past it are padding and are not written
  bool accumulate;             // false: c is written; true: c is added to
  const float* bias;           // null, or num_columns values to add after the sums
  const float* residual;       // null, or what to add last: rows c_row_stride apart, as in c
  const char* prefetch;        // null, or bytes that will be wanted next
  std::ptrdiff_t prefetch_bytes;
};

using TileFunction = void (*)(const Tile&);

// The tile kernels of one instruction set: [storage][x packed or not][rows - 1], for 1 to max_rows rows.
struct TileTable {
  std::ptrdiff_t max_rows;
  TileFunction functions[2][2][kMaxTileRows];
};

extern const TileTable kPortableTiles;
#if defined(__x86_64__)
extern const TileTable kAvx2Tiles;    // the two give the same bits
extern const TileTable kAvx512Tiles;
#endif

struct PackedWeight {
  const void* data;
  std::ptrdiff_t num_columns;  // N
  std::ptrdiff_t num_k;        // K
  Storage storage;
};

// Packs rows [first_row, first_row + num_rows) of weight[N, K], given as float32 with that many rows, into `packed`.
// first_row is a multiple of 16; num_rows is one too unless these rows are the last. float32 is rounded to nearest
// even for bfloat16.
void pack_rows(const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t num_k,
               Storage storage, void* packed);

// y[num_rows, N] from x[num_rows, K], both contiguous. bias is null or N values; residual is null or [num_rows, N],
// contiguous. y overlaps neither x nor residual: it holds partial sums between blocks of k.
void linear(const TileTable& tiles, const PackedWeight& weight, const float* bias, const float* residual,
            const float* x, std::ptrdiff_t num_rows, float* y);

}  // namespace antiphon::cpu
