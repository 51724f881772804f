// Portable attention: plain C++ that a compiler can vectorise for any machine, and that valgrind can follow.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/attention.h"

namespace antiphon::cpu {
namespace {

constexpr int kLanes = 8;

float widen(float value) { return value; }
float widen(std::int8_t value) { return static_cast<float>(value); }
float widen(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <typename T>
void pack_keys(const void* page, std::ptrdiff_t num_keys, std::ptrdiff_t head_dim, float* packed) {
  for (std::ptrdiff_t first = 0; first < num_keys; first += kPanel) {
    for (std::ptrdiff_t i = 0; i < kPanel; ++i) {
      // Past the end any key will do: it is masked.
      const T* row = static_cast<const T*>(page) + std::min(first + i, num_keys - 1) * head_dim;
      for (std::ptrdiff_t element = 0; element < head_dim; ++element) {
        packed[element * kPanel + i] = widen(row[element]);
      }
    }
    packed += head_dim * kPanel;
  }
}

template <typename T>
void pack_values(const void* page, std::ptrdiff_t num_keys, std::ptrdiff_t head_dim, float* packed) {
  for (std::ptrdiff_t first = 0; first < head_dim; first += kPanel) {
    for (std::ptrdiff_t key = 0; key < num_keys; ++key) {
      const T* row = static_cast<const T*>(page) + key * head_dim;
      for (std::ptrdiff_t column = first; column < first + kPanel; ++column) {
        *packed++ = column < head_dim ? widen(row[column]) : 0.0f;
      }
    }
  }
}

// sums[row] += a[row][k] * b[k][16] over ascending k: one chain for each element.
template <int kRows>
void chain(float (&sums)[kRows][kPanel], const float* a, std::ptrdiff_t a_row_stride, const float* b,
           std::ptrdiff_t num_k) {
  for (std::ptrdiff_t k = 0; k < num_k; ++k) {
    for (int row = 0; row < kRows; ++row) {
      const float x = a[row * a_row_stride + k];
      for (int i = 0; i < kPanel; ++i) sums[row][i] += x * b[k * kPanel + i];
    }
  }
}

// 2^x for x <= 0 within 2 units in the last place, 0 below -126; NaN stays NaN. See attention_avx2.cpp.
float exp2_of_negative(float x) {
  const float shifted = x + 0x1.8p23f;
  const float f = x - (shifted - 0x1.8p23f);
  float p = 0.00015353361959569156f;
  p = p * f + 0.0013398875016719103f;
  p = p * f + 0.00961843691766262f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.0f;
  std::uint32_t bits;
  std::uint32_t exponent;
  std::memcpy(&bits, &p, sizeof(bits));
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  bits += exponent << 23;
  float scaled;
  std::memcpy(&scaled, &bits, sizeof(scaled));
  if (x != x) return x;  // a NaN's low bits are in `exponent`: the sum could be any number
  return x < -126.0f ? 0.0f : scaled;
}

// scores[64] of one row become its weights; returns the correction of what was summed so far.
float soften(const AttentionTile& tile, int row, float* scores) {
  const std::ptrdiff_t seen = tile.num_seen[row];
  const float before = tile.max[row];
  float now = before;
  for (std::ptrdiff_t key = 0; key < seen; ++key) {
    if (tile.k_scale != nullptr) scores[key] *= tile.k_scale[key];
    now = std::max(now, scores[key]);
  }
  float lanes[kLanes] = {};
  for (std::ptrdiff_t key = 0; key < seen; ++key) {
    scores[key] = exp2_of_negative(scores[key] - now);
    lanes[key % kLanes] += scores[key];
    if (tile.v_scale != nullptr) scores[key] *= tile.v_scale[key];
  }
  const float correction = exp2_of_negative(before - now);
  const float sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  tile.max[row] = now;
  tile.sum[row] = correction * tile.sum[row] + sum;
  return correction;
}

// accumulator = correction * accumulator + weights * values over keys [first, end).
template <int kRows>
void add_values(const AttentionTile& tile, int first_row, const float* weights, const float* corrections,
                std::ptrdiff_t first, std::ptrdiff_t end) {
  const std::ptrdiff_t num_panels = (tile.head_dim + kPanel - 1) / kPanel;
  const std::ptrdiff_t row_stride = num_panels * kPanel;
  for (std::ptrdiff_t panel = 0; panel < num_panels; ++panel) {
    float* accumulator = tile.accumulator + first_row * row_stride + panel * kPanel;
    float sums[kRows][kPanel];
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kPanel; ++i) sums[row][i] = corrections[row] * accumulator[row * row_stride + i];
    }
    chain<kRows>(sums, weights + first_row * kPageKeys + first, kPageKeys,
                 tile.values + (panel * tile.num_keys + first) * kPanel, end - first);
    for (int row = 0; row < kRows; ++row) std::memcpy(accumulator + row * row_stride, sums[row], sizeof(sums[row]));
  }
}

template <int kRows>
void run_tile(const AttentionTile& tile) {
  float scores[kRows * kPageKeys];
  float corrections[kRows];
  const std::ptrdiff_t fewest = *std::min_element(tile.num_seen, tile.num_seen + kRows);
  const std::ptrdiff_t most = *std::max_element(tile.num_seen, tile.num_seen + kRows);
  for (std::ptrdiff_t key = 0; key < most; key += kPanel) {
    float sums[kRows][kPanel] = {};
    chain<kRows>(sums, tile.q, tile.head_dim, tile.keys + key * tile.head_dim, tile.head_dim);
    for (int row = 0; row < kRows; ++row) std::memcpy(scores + row * kPageKeys + key, sums[row], sizeof(sums[row]));
  }
  for (int row = 0; row < kRows; ++row) corrections[row] = soften(tile, row, scores + row * kPageKeys);
  add_values<kRows>(tile, 0, scores, corrections, 0, fewest);
  const float unchanged = 1.0f;
  for (int row = 0; row < kRows; ++row) {
    if (tile.num_seen[row] > fewest) add_values<1>(tile, row, scores, &unchanged, fewest, tile.num_seen[row]);
  }
}

}  // namespace

const AttentionForm kPortableAttention = {
    {pack_keys<float>, pack_keys<std::uint16_t>, pack_keys<std::int8_t>},
    {pack_values<float>, pack_values<std::uint16_t>, pack_values<std::int8_t>},
    {run_tile<1>, run_tile<2>, run_tile<3>, run_tile<4>, run_tile<5>, run_tile<6>},
};

}  // namespace antiphon::cpu
