// What the emulated tests of amx_normed.h run, and the rows that its promise gives for the same operands.
#pragma once

#include <algorithm>

#include "checks.h"
#include "cpu/amx_normed.h"
#include "cpu/pool.h"
#include "cpu/rounding.h"
#include "elementary.h"
#include "naive.h"

namespace normed {

using namespace antiphon::cpu;
using checks::Floats;

// Of an MLP, `size` is that of h, and columns = num_k; of a linear layer, `size` is 0.
struct Sizes {
  std::ptrdiff_t rows, num_k, size, columns;

  std::ptrdiff_t padded() const { return ceil_div(size, kGatedColumns) * kGatedColumns; }
  checks::Shape shape() const { return {rows, num_k, columns}; }
};

inline Sizes mlp_sizes(std::ptrdiff_t rows, std::ptrdiff_t num_k, std::ptrdiff_t size) {
  return {rows, num_k, size, num_k};
}
inline Sizes linear_sizes(std::ptrdiff_t rows, std::ptrdiff_t num_k, std::ptrdiff_t columns) {
  return {rows, num_k, 0, columns};
}

// Weights whose sums are about 1.
inline Floats random_weight(std::ptrdiff_t rows, std::ptrdiff_t num_k, unsigned seed) {
  Floats values = checks::random_floats(rows * num_k, seed);
  for (float& value : values) value /= std::sqrt(static_cast<float>(num_k));
  return values;
}

struct Operands {
  Sizes sizes;
  Floats gate, up, down;  // of an MLP
  Floats weight, bias;    // of a linear layer
  Floats norm, x;
  float eps = 1e-6f;

  explicit Operands(Sizes of, unsigned seed = 0)
      : sizes(of),
        gate(random_weight(of.size, of.num_k, seed + 1)),
        up(random_weight(of.size, of.num_k, seed + 2)),
        down(random_weight(of.size > 0 ? of.columns : 0, of.size, seed + 3)),
        weight(random_weight(of.size > 0 ? 0 : of.columns, of.num_k, seed + 4)),
        bias(checks::random_floats(of.columns, seed + 5)),
        norm(checks::random_floats(of.num_k, seed + 6)),
        x(checks::random_floats(of.rows * of.num_k, seed + 7)) {
    for (float& value : norm) value = 2.0f + 0.5f * value;
    for (std::ptrdiff_t i = 0; i < of.rows * of.num_k; ++i) x[i] *= 0.25f * static_cast<float>(1 + i / of.num_k % 9);
  }

  RowNorm row_norm() const { return {norm.data(), eps}; }

  // Panels of 16 rows of gate and the same 16 of up, filled up with zeros.
  Floats gate_up() const {
    Floats rows(static_cast<std::size_t>(2 * sizes.padded() * sizes.num_k));
    for (std::ptrdiff_t s = 0; s < sizes.size; ++s) {
      const std::ptrdiff_t first = s / kGatedColumns * 2 * kGatedColumns + s % kGatedColumns;
      std::copy_n(&gate[s * sizes.num_k], sizes.num_k, &rows[first * sizes.num_k]);
      std::copy_n(&up[s * sizes.num_k], sizes.num_k, &rows[(first + kGatedColumns) * sizes.num_k]);
    }
    return rows;
  }
};

// gate * up / (1 + e^-gate) before it is rounded.
inline float gated(float gate, float up) {
  const float x = gate * -1.44269504f;
  const float f = emulated::past_floor(x);
  float p = 0x1.3f9670p-4f;
  for (const float c : {0x1.cefc70p-3f, 0x1.644448p-1f, 0x1.fff632p-1f}) p = std::fmaf(p, f, c);
  return gate * emulated::reciprocal(1.0f + emulated::scale(p, x)) * up;
}

// hadamard.h, one half after the other: what comes of the sums, then of the differences.
inline Floats hadamard_sums(const Floats& x) {
  const std::size_t half = x.size() / 2;
  if (half == 0) return x;
  Floats sums, differences;
  for (std::size_t i = 0; i < half; ++i) {
    sums.push_back(x[i] + x[half + i]);
    differences.push_back(x[i] - x[half + i]);
  }
  Floats out = hadamard_sums(sums);
  const Floats rest = hadamard_sums(differences);
  out.insert(out.end(), rest.begin(), rest.end());
  return out;
}

// Blocks of bfloat16 values, rotated and rounded again.
inline Floats rotated(const Floats& h, std::ptrdiff_t block) {
  if (block == 1) return h;
  const float scale = 1.0f / std::sqrt(static_cast<float>(block));
  Floats out;
  for (auto first = h.begin(); first != h.end(); first += block) {
    for (const float sum : hadamard_sums(Floats(first, first + block))) {
      out.push_back(naive::to_bfloat16_and_back(sum * scale));
    }
  }
  return out;
}

// The largest power of two up to 256 that divides an MLP's size.
inline std::ptrdiff_t largest_block(std::ptrdiff_t size) {
  std::ptrdiff_t block = 1;
  while (block < 256 && size % (2 * block) == 0) block *= 2;
  return block;
}

// A weight as bfloat16: packed, and its values.
class Bf16Weight {
 public:
  Bf16Weight(const Floats& rows, std::ptrdiff_t columns, std::ptrdiff_t num_k)
      : rows_(naive::rounded(rows)),
        columns_(columns),
        num_k_(num_k),
        packed_(static_cast<std::size_t>(amx_bf16_packed_bytes(columns, num_k))) {
    amx_bf16_pack_rows(rows.data(), 0, columns, num_k, packed_.data());
  }
  AmxBf16Weight weight() const { return {packed_.data(), columns_, num_k_}; }

  // A row of x, rounded, times every row of the weight.
  Floats product(const Floats& row) const {
    const Floats x = naive::rounded(row);
    Floats sums;
    for (std::ptrdiff_t n = 0; n < columns_; ++n) sums.push_back(naive::bf16_sum(x.data(), &rows_[n * num_k_], num_k_));
    return sums;
  }

 private:
  Floats rows_;
  std::ptrdiff_t columns_, num_k_;
  std::vector<char> packed_;
};

// As int8.
class QuantizedWeight {
 public:
  QuantizedWeight(const Floats& rows, std::ptrdiff_t columns, std::ptrdiff_t num_k)
      : rows_(rows, columns, num_k),
        columns_(columns),
        num_k_(num_k),
        panels_(static_cast<std::size_t>(kAmxInt8Form.num_panels(columns) * kAmxInt8Form.panel_bytes(num_k))),
        scales_(checks::poison(columns)) {
    const std::int32_t sum =
        pack_int8_rows(kAmxInt8Form, rows.data(), 0, columns, num_k, panels_.data(), scales_.data());
    levels_ = int8_levels(kAmxInt8Form, sum);
  }
  Int8Weight weight() const { return {panels_.data(), scales_.data(), columns_, num_k_, levels_}; }

  Floats product(const Floats& row) const {
    std::vector<std::int32_t> q(row.size());
    const float scale = naive::quantize_row(row.data(), levels_, q);
    Floats sums;
    for (std::ptrdiff_t n = 0; n < columns_; ++n) sums.push_back(naive::int8_product(q, scale, rows_, n));
    return sums;
  }

 private:
  naive::Int8Rows rows_;
  std::ptrdiff_t columns_, num_k_;
  std::vector<char> panels_;
  Floats scales_;
  std::int32_t levels_ = 0;
};

inline void run_mlp(const Bf16Weight& gate_up, const Bf16Weight& down, const RowNorm& norm, std::ptrdiff_t,
                    const float* x, std::ptrdiff_t rows, float* y) {
  amx_bf16_mlp(gate_up.weight(), down.weight(), norm, x, rows, y);
}
inline void run_mlp(const QuantizedWeight& gate_up, const QuantizedWeight& down, const RowNorm& norm,
                    std::ptrdiff_t block, const float* x, std::ptrdiff_t rows, float* y) {
  amx_int8_mlp(gate_up.weight(), down.weight(), norm, block, x, rows, y);
}
inline void run_linear(const Bf16Weight& weight, const float* bias, const RowNorm& norm, const float* x,
                       std::ptrdiff_t rows, float* y) {
  amx_bf16_normed(weight.weight(), bias, norm, x, rows, y);
}
inline void run_linear(const QuantizedWeight& weight, const float* bias, const RowNorm& norm, const float* x,
                       std::ptrdiff_t rows, float* y) {
  amx_int8_normed(weight.weight(), bias, norm, x, rows, y);
}

template <typename Weight, bool kRotated = false>
class Mlp {
 public:
  static constexpr bool kIsMlp = true;

  explicit Mlp(const Operands& o)
      : o_(o),
        block_(kRotated ? largest_block(o.sizes.size) : 1),
        gate_up_(o.gate_up(), 2 * o.sizes.padded(), o.sizes.num_k),
        down_(o.down, o.sizes.columns, o.sizes.size) {}

  void run(const float* x, std::ptrdiff_t rows, float* y) const {
    run_mlp(gate_up_, down_, o_.row_norm(), block_, x, rows, y);
  }

  Floats promised_row(const float* x) const {
    const Floats sums = gate_up_.product(naive::normed(x, o_.norm, o_.eps));
    Floats h;
    for (std::ptrdiff_t s = 0; s < o_.sizes.size; ++s) {
      const std::ptrdiff_t gate = s / kGatedColumns * 2 * kGatedColumns + s % kGatedColumns;
      h.push_back(naive::to_bfloat16_and_back(gated(sums[gate], sums[gate + kGatedColumns])));
    }
    Floats y = down_.product(rotated(h, block_));
    for (std::ptrdiff_t n = 0; n < o_.sizes.columns; ++n) y[n] += x[n];
    return y;
  }

 private:
  const Operands& o_;
  std::ptrdiff_t block_;
  Weight gate_up_, down_;
};

template <typename Weight, bool kWithBias>
class Linear {
 public:
  static constexpr bool kIsMlp = false;

  explicit Linear(const Operands& o) : o_(o), weight_(o.weight, o.sizes.columns, o.sizes.num_k) {}

  void run(const float* x, std::ptrdiff_t rows, float* y) const {
    run_linear(weight_, kWithBias ? o_.bias.data() : nullptr, o_.row_norm(), x, rows, y);
  }

  Floats promised_row(const float* x) const {
    Floats y = weight_.product(naive::normed(x, o_.norm, o_.eps));
    for (std::ptrdiff_t n = 0; n < o_.sizes.columns && kWithBias; ++n) y[n] += o_.bias[n];
    return y;
  }

 private:
  const Operands& o_;
  Weight weight_;
};

template <typename Block>
Floats promised(const Block& block, const Operands& o) {
  Floats y;
  for (std::ptrdiff_t m = 0; m < o.sizes.rows; ++m) {
    const Floats row = block.promised_row(&o.x[m * o.sizes.num_k]);
    y.insert(y.end(), row.begin(), row.end());
  }
  return y;
}

// Rows [first, first + count).
template <typename Block>
Floats run(const Block& block, const Operands& o, std::ptrdiff_t first, std::ptrdiff_t count) {
  const std::ptrdiff_t num_k = o.sizes.num_k;
  const Floats x(o.x.begin() + first * num_k, o.x.begin() + (first + count) * num_k);
  Floats y = checks::poison(count * o.sizes.columns);
  block.run(x.data(), count, y.data());
  return y;
}

// Leaves NaN wherever the workspaces keep what is between the products.
template <typename Block>
void poison_workspaces(const Block& block, const Sizes& s) {
  const std::ptrdiff_t rows = s.rows + 40;
  const Floats x = checks::poison(rows * s.num_k);
  Floats y = checks::poison(rows * s.columns);
  block.run(x.data(), rows, y.data());
}

template <typename Block>
Sizes sizes_of(std::ptrdiff_t rows, std::ptrdiff_t num_k, std::ptrdiff_t columns) {
  return Block::kIsMlp ? mlp_sizes(rows, num_k, columns) : linear_sizes(rows, num_k, columns);
}

}  // namespace normed
