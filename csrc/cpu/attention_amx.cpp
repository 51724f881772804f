// Attention on AMX tiles: see attention_bf16.h for the numbers. Tile and vector units work at the same time, each on
// other row tiles: while one tile's scores become weights, the scores of the next are multiplied, and the weights of
// the one before.
#if defined(__x86_64__)
#include "cpu/attention.h"
#include "cpu/attention_amx_tiles.h"
#include "cpu/attention_bf16_softmax.h"
#include "cpu/attention_bf16_work.h"

namespace antiphon::cpu {
namespace amx {
namespace {

using bf16::PagePrefetch;
using bf16::RowTile;
using bf16::Scratch;
using bf16::Softened;
using bf16::Softmax;

// One tile's scores to weights beside the tile unit's work, by turns in pieces so small that the processor has both
// before it at any time.
template <bool kInt8, bool kMasked>
ANTIPHON_AMX ANTIPHON_INLINE Softened soften_beside(const PackedBlock& block, const RowTile& tile, const float* scores,
                                                    char* weights, const TileWork<kInt8>& tile_work,
                                                    PagePrefetch& prefetch) {
  Softmax<kInt8, kMasked> softmax(block, tile, scores, weights);
  const TileWork<kInt8> work = tile_work;
  const std::ptrdiff_t num_steps = work.num_steps();
  for (std::ptrdiff_t quarter = 0; quarter < 4; ++quarter) {
    prefetch.step();
    const std::ptrdiff_t first = quarter * num_steps / 4, count = (quarter + 1) * num_steps / 4 - first;
    ANTIPHON_UNROLL(4)
    for (int part = 0; part < 4; ++part) {
      order_memory();
      work.run_part(first, count, part);
      order_memory();
      softmax.four_keys(16 * quarter + 4 * part);
    }
  }
  order_memory();
  return softmax.end();
}

// The same, whatever the scores and values are.
template <bool kInt8, bool kMasked>
ANTIPHON_AMX __attribute__((noinline)) void soften(const PackedBlock& block, const RowTile& tile, const float* scores,
                                                   char* weights, const TileWork<kInt8>& work, PagePrefetch& prefetch) {
  if (block.first) {
    const __m512i seen = _mm512_loadu_si512(tile.seen);
    bf16::move_reference<kInt8>(block, tile, scores, _mm512_cmpgt_epi32_mask(seen, _mm512_setzero_si512()));
  }
  Softened done = soften_beside<kInt8, kMasked>(block, tile, scores, weights, work, prefetch);
  if (done.too_large != 0) {
    work.with_sums_in_memory([&]() ANTIPHON_AMX {
      bf16::move_reference<kInt8>(block, tile, scores, done.too_large);
    });
    done = bf16::soften_alone<kInt8, kMasked>(block, tile, scores, weights);
  }
  if (kInt8) _mm512_storeu_ps(tile.sum, _mm512_add_ps(done.sum, _mm512_loadu_ps(tile.sum)));
  if (!kInt8 && block.first_bad_key < kPageKeys) {
    work.with_sums_in_memory([&]() ANTIPHON_AMX { bf16::spoil(block, tile); });
  }
}

// Units one after the other.
template <bool kInt8>
ANTIPHON_AMX void run_units(const Unit* units, std::ptrdiff_t num_units, const Scratch& scratch,
                            PagePrefetch& prefetch) {
  if (num_units == 0) return;
  const std::ptrdiff_t steps = units->block->steps;
  const auto unit = [&](std::ptrdiff_t i) { return i >= 0 && i < num_units ? units + i : nullptr; };
  TileWork<kInt8>{units, scratch.scores[0], nullptr, nullptr, nullptr, steps}.run_all();
  for (std::ptrdiff_t i = 0; i < num_units; ++i) {
    const int here = i % 2, other = 1 - here;
    const TileWork<kInt8> work{unit(i + 1), scratch.scores[other], unit(i - 1), scratch.weights[other],
                               unit(i - 2), steps};
    if (units[i].tile.masked) {
      soften<kInt8, true>(*units[i].block, units[i].tile, scratch.scores[here], scratch.weights[here], work, prefetch);
    } else {
      soften<kInt8, false>(*units[i].block, units[i].tile, scratch.scores[here], scratch.weights[here], work, prefetch);
    }
  }
  TileWork<kInt8>{nullptr, nullptr, unit(num_units - 1), scratch.weights[(num_units - 1) % 2], unit(num_units - 2),
                  steps}.run_all();
  TileWork<kInt8>{nullptr, nullptr, nullptr, nullptr, unit(num_units - 1), steps}.run_all();
}

struct Form {
  ANTIPHON_AMX static void begin() {
    alignas(kLineBytes) std::uint16_t ones[32];
    std::fill_n(ones, 32, std::uint16_t{0x3f80});
    load_attention_config(reinterpret_cast<const char*>(ones));
  }
  ANTIPHON_AMX static void end() { _tile_release(); }
  static std::ptrdiff_t prefetches(std::ptrdiff_t) { return 4; }

  template <bool kInt8>
  static void run_units(const Unit* units, std::ptrdiff_t num_units, const Scratch& scratch, PagePrefetch& prefetch) {
    amx::run_units<kInt8>(units, num_units, scratch, prefetch);
  }
};

}  // namespace
}  // namespace amx

const AttentionForm kAmxAttention = {{}, {}, {}, bf16::run_item<amx::Form>, {448, bf16::kTileRows}};

}  // namespace antiphon::cpu
#endif
