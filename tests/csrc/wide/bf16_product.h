// What the emulated tests of products of bfloat16 with bfloat16 share: bit for bit the sums that a form promises, for
// any shape, and near the exact ones.
#pragma once

#include <algorithm>

#include "checks.h"
#include "cpu/amx_linear.h"
#include "cpu/pool.h"
#include "naive.h"
#include "stores.h"

namespace bf16 {

using namespace antiphon::cpu;
using checks::Floats;
using checks::Operands;
using checks::Shape;

// A form, and the sum that its header promises.
struct Form {
  const char* name;
  decltype(&amx_bf16_linear) linear;
  float (*sum)(const float* x, const float* w, std::ptrdiff_t num_k);
};

class Layer {
 public:
  Layer(const Form& form, const Operands& o)
      : form_(form), operands_(o), packed_(amx_bf16_packed_bytes(o.shape.columns, o.shape.num_k)) {
    // In two goes, as a weight is streamed in.
    const std::ptrdiff_t first = std::min<std::ptrdiff_t>(o.shape.columns, kAmxPanelColumns);
    amx_bf16_pack_rows(o.weight.data(), 0, first, o.shape.num_k, packed_.data());
    amx_bf16_pack_rows(o.weight.data() + first * o.shape.num_k, first, o.shape.columns - first, o.shape.num_k,
                       packed_.data());
  }

  // Rows [first, first + count) of x.
  Floats run(std::ptrdiff_t first, std::ptrdiff_t count, bool with_bias = true, bool with_residual = true) const {
    const Shape& s = operands_.shape;
    const Floats x = operands_.x_rows(first, count), residual = operands_.residual_rows(first, count);
    Floats y = checks::poison(count * s.columns);
    form_.linear({packed_.data(), s.columns, s.num_k}, with_bias ? operands_.bias.data() : nullptr,
                 with_residual ? residual.data() : nullptr, x.data(), count, y.data());
    return y;
  }

  // The first rows, to memory `shift` floats past a multiple of 64 bytes.
  Floats run_at(std::ptrdiff_t shift, std::ptrdiff_t count) const {
    const Shape& s = operands_.shape;
    Floats memory = checks::poison(count * s.columns + 16 + shift);
    const std::ptrdiff_t past = static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(memory.data()) / 4 % 16);
    float* y = memory.data() + (16 - past) % 16 + shift;
    form_.linear({packed_.data(), s.columns, s.num_k}, operands_.bias.data(), operands_.residual.data(),
                 operands_.x.data(), count, y);
    return Floats(y, y + count * s.columns);
  }

  Floats promised(bool with_bias, bool with_residual) const {
    const Operands& o = operands_;
    const Floats x = naive::rounded(o.x), w = naive::rounded(o.weight);
    Floats y(o.residual.size());
    for (std::ptrdiff_t m = 0; m < o.shape.rows; ++m) {
      for (std::ptrdiff_t n = 0; n < o.shape.columns; ++n) {
        float value = form_.sum(&x[m * o.shape.num_k], &w[n * o.shape.num_k], o.shape.num_k);
        if (with_bias) value += o.bias[n];
        if (with_residual) value += o.residual[m * o.shape.columns + n];
        y[m * o.shape.columns + n] = value;
      }
    }
    return y;
  }

 private:
  const Form& form_;
  const Operands& operands_;
  std::vector<char> packed_;
};

// All checks of one form.
class Checks {
 public:
  Checks(const Form& form, checks::Report& report) : form_(form), report_(report) {}

  void run() {
    check_shapes();
    check_accuracy();
    check_rows_alone({130, 33, 17});
    check_rows_alone({33, 910, 5});
    check_threads();
    check_special_values();
    check_control();
  }

  // For shapes of more rows, or a longer K, than the form takes on at a time.
  void check_shape(const Shape& shape) {
    const Operands o(shape, static_cast<unsigned>(shape.rows));
    const Layer layer(form_, o);
    for (int options = 0; options < 4; ++options) {
      report_.expect_equal(layer.run(0, shape.rows, options & 1, options & 2),
                           layer.promised(options & 1, options & 2), checks::describe(form_.name, shape));
    }
  }

 private:
  void check_shapes() {
    for (const Shape& shape : {Shape{1, 1, 1}, Shape{2, 31, 15}, Shape{15, 32, 16}, Shape{16, 33, 17},
                               Shape{17, 64, 31}, Shape{31, 65, 32}, Shape{32, 96, 33}, Shape{33, 447, 64},
                               Shape{47, 448, 65}, Shape{48, 449, 100}, Shape{5, 896, 3}, Shape{49, 897, 70},
                               Shape{130, 100, 97},
                               Shape{3, 2000, 40}, Shape{36, 1800, 100}}) {
      check_shape(shape);
    }
  }

  // Rounding of x, of the weight, and of the sums: within a bound that a wrong element of k would pass.
  void check_accuracy() {
    const Operands o({20, 500, 40});
    const Floats y = Layer(form_, o).run(0, 20, false, false);
    for (std::ptrdiff_t m = 0; m < 20; ++m) {
      for (std::ptrdiff_t n = 0; n < 40; ++n) {
        double exact = 0, size = 0;
        for (std::ptrdiff_t k = 0; k < 500; ++k) {
          const double product = double{o.x[m * 500 + k]} * o.weight[n * 500 + k];
          exact += product;
          size += std::fabs(product);
        }
        report_.expect(std::fabs(y[m * 40 + n] - exact) <= size * 0x1p-8, "near the exact product");
      }
    }
  }

  void check_rows_alone(const Shape& shape) {
    const Operands o(shape);
    const Layer layer(form_, o);
    checks::expect_rows_alone(report_, form_.name, shape,
                              [&](std::ptrdiff_t first, std::ptrdiff_t count) { return layer.run(first, count); });
  }

  void check_threads() {
    for (const Shape& shape : {Shape{1, 100, 300}, Shape{40, 100, 300}, Shape{70, 1000, 200}}) {
      const Operands o(shape);
      const Layer layer(form_, o);
      const Floats expected = layer.run(0, shape.rows);
      for (int threads : {2, 3, 5}) {
        set_num_threads(threads);
        report_.expect_equal(layer.run(0, shape.rows), expected, checks::describe(form_.name, shape, "threads"));
      }
      set_num_threads(1);
    }
  }

  void check_special_values() {
    Operands o({20, 40, 20});
    const Floats expected = Layer(form_, o).run(0, 20);
    o.x[7 * 40 + 39] = std::numeric_limits<float>::quiet_NaN();
    const Floats y = Layer(form_, o).run(0, 20);
    for (std::ptrdiff_t i = 0; i < 400; ++i) {
      const bool same = std::memcmp(&y[i], &expected[i], sizeof(float)) == 0;
      report_.expect(i / 20 == 7 ? std::isnan(y[i]) : same, "a NaN stays in its row");
    }
    Operands odd({3, 40, 20});
    for (std::size_t i = 0; i < odd.x.size(); i += 3) odd.x[i] = 1e-40f;
    for (std::size_t i = 0; i < odd.weight.size(); i += 7) odd.weight[i] = 1e-30f;
    for (std::size_t i = 0; i < odd.x.size(); i += 4) odd.x[i] = 1.00390625f;  // halfway between two bfloat16
    report_.expect_equal(Layer(form_, odd).run(0, 3), Layer(form_, odd).promised(true, true), "small numbers and ties");
  }

  // Negative control: the comparison by bits notices another order of the same sums.
  void check_control() {
    Operands o({4, 200, 40});
    const Floats y = Layer(form_, o).run(0, 4, false, false);
    Operands reversed = o;
    for (std::ptrdiff_t m = 0; m < 4; ++m) std::reverse(&reversed.x[m * 200], &reversed.x[m * 200] + 200);
    for (std::ptrdiff_t n = 0; n < 40; ++n) std::reverse(&reversed.weight[n * 200], &reversed.weight[n * 200] + 200);
    report_.expect(Layer(form_, reversed).run(0, 4, false, false) != y, "another order has other bits");
  }

  const Form& form_;
  checks::Report& report_;
};

// A y too large to stay in the caches is stored past them where its lines are whole, and has the same bits.
inline void check_large_y(const Form& form, checks::Report& report) {
  const Shape shape{512, 8, 1024};  // 2 MiB
  const Operands o(shape);
  const Floats expected = Layer(form, o).run(0, shape.rows);
  for (const std::ptrdiff_t rows : {shape.rows, shape.rows - 1}) {
    for (const std::ptrdiff_t shift : {0, 1}) {
      const long before = emulated::num_streamed;
      report.expect_equal(Layer(form, o).run_at(shift, rows),
                          Floats(expected.begin(), expected.begin() + rows * shape.columns),
                          "a large y has the same bits");
      const bool streams = rows == shape.rows && shift == 0;
      report.expect(emulated::num_streamed - before == (streams ? rows * shape.columns / 16 : 0),
                    "whole lines of a large y, and nothing else, go past the caches");
    }
  }
}

}  // namespace bf16
