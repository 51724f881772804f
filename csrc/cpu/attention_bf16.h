// Paged attention that multiplies bfloat16 and sums float32: on AMX tiles (attention_amx.cpp) and on AVX-512 BF16
// (attention_avx512_bf16.cpp). The two differ in what a step sums, and in nothing else:
//   AMX           TDPBF16PS, amx_linear.h says what it does
//   AVX-512 BF16  one chain of VDPBF16PS from the sum before, avx512_bf16_linear.h says what it does
//
// A block is one page of 64 keys, as in attention.h. A query's result is computed in one order that its position p
// alone determines:
//   query   q is scaled by log2(e) / sqrt(head_dim) and rounded to bfloat16, ties to even; int8 is widened, exactly
//   blocks  in ascending b, one at a time: keys 0 to n - 1 of it are seen, n = min(64, p - 64 b + 1)
//   scores  s_j = steps over 32 of head_dim, ascending
//   softmax x_j = s_j - ref, with int8 one multiply-add of s_j, k_scale[j] and -ref;
//           w_j = 2^floor(x_j) P(x_j - floor(x_j)), P(f) = 1 + f (c1 + f (c2 + f c3)) by multiply-adds;
//           below 2^-126 it is 0
//           ref: the largest score of block 0, until a block has a weight over 2^32: then that block's largest score,
//           and all that was summed is first multiplied by 2^(ref before - ref), computed as a weight is
//   values  w_j is rounded to bfloat16, ties up (with int8, w_j v_scale[j]); accumulator = steps over keys 0 to 31,
//           then 32 to 63, of the weights and the values
//   sum     of the rounded weights, in the same steps; with int8, of the weights as they are: the even keys and the odd
//           keys of the block ascending, then the two, then the sum before
//   out     accumulator * (1 / sum), and a zero is +0
// A key that a query does not see has weight 0 and, were it not finite, values 0: both add nothing, to the bit. A query
// that sees a key whose stored bfloat16 values are not all finite gets NaN throughout. Subnormal numbers are zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/amx_tiles.h"
#include "cpu/kv_layer.h"

namespace antiphon::cpu::bf16 {

using amx::kLineBytes;
using amx::kTileBytes;

constexpr std::ptrdiff_t kTileRows = 16;   // query rows of a tile: the lanes of a register
constexpr std::ptrdiff_t kStepDims = 32;
constexpr std::ptrdiff_t kStepKeys = 32;
constexpr std::ptrdiff_t kScoreFloats = kPageKeys * kTileRows;
constexpr std::ptrdiff_t kWeightBytes = kPageKeys * kTileRows * 2;

// Sixteen query rows and what was summed for them. `steps` is head_dim / 32, rounded up.
struct RowTile {
  char* queries;       // [steps][16 pairs of dims][16 rows][2]
  float* accumulator;  // [32 steps dims][16 rows]
  float* sum;          // [16]
  float* reference;    // [16]
  const std::int32_t* seen;  // [16] keys of the present block
  std::ptrdiff_t num_rows;   // the other lanes have queries of zeros
  bool masked;               // not all rows see all keys

  static constexpr std::ptrdiff_t num_bytes(std::ptrdiff_t steps) { return 3 * steps * kTileBytes + 2 * kLineBytes; }
};

// One page, ready to be multiplied.
struct PackedBlock {
  const char* keys;  // 64 lines of bfloat16 [32 steps], key_bytes apart
  std::ptrdiff_t key_bytes;
  const char* values;    // [2 steps of keys][2 steps tiles of 16 dims][16 dims][32 keys]
  const float* k_scale;  // [64], int8 alone
  const float* v_scale;
  std::ptrdiff_t steps;
  std::ptrdiff_t first_bad_key;  // the first that is not finite, 64 if all are
  bool first;                    // block 0
};

// One row tile and one block: what is softened at a time.
struct Unit {
  const PackedBlock* block;
  RowTile tile;
};

// Scratch memory of a thread: scores and weights of two tiles, one in the tile unit and one in the vector unit.
struct Scratch {
  float* scores[2];  // [64 keys][16 rows]
  char* weights[2];  // [32 pairs of keys][16 rows][2]
};

}  // namespace antiphon::cpu::bf16
