// The float32 and bfloat16 tiles of emulated AVX-512: bit for bit the sums that linear.h promises, for any shape. The AVX2
// tiles keep the same promise, so both forms give the same bits.
#include <algorithm>

#include "checks.h"
#include "cpu/bfloat16.h"
#include "cpu/linear.h"
#include "cpu/pool.h"
#include "tiles.h"

using namespace antiphon::cpu;
using checks::Floats;
using checks::Operands;
using checks::Shape;

namespace {

checks::Report report;

const char* name_of(Storage storage) { return storage == Storage::kFloat32 ? "avx512 float32" : "avx512 bfloat16"; }

float promised(const float* x, const float* w, std::ptrdiff_t num_k) {
  float total = 0.0f;
  for (std::ptrdiff_t block = 0; block < num_k; block += kBlockK) {
    float sum = 0.0f;
    for (std::ptrdiff_t k = block; k < std::min(num_k, block + kBlockK); ++k) sum = std::fmaf(x[k], w[k], sum);
    total = block == 0 ? sum : total + sum;
  }
  return total;
}

class Layer {
 public:
  Layer(const Operands& o, Storage storage) : operands_(o), storage_(storage) {
    const Shape& s = o.shape;
    const std::ptrdiff_t panels = (s.columns + kPanelColumns - 1) / kPanelColumns;
    packed_.resize(static_cast<std::size_t>(panels * kPanelColumns * s.num_k) * element_bytes(storage));
    pack_rows(o.weight.data(), 0, s.columns, s.num_k, storage, packed_.data());
  }

  // Rows [first, first + count) of x.
  Floats run(std::ptrdiff_t first, std::ptrdiff_t count, bool with_bias = true, bool with_residual = true) const {
    const Shape& s = operands_.shape;
    const Floats x = operands_.x_rows(first, count), residual = operands_.residual_rows(first, count);
    Floats y = checks::poison(count * s.columns);
    linear(kAvx512Tiles, {packed_.data(), s.columns, s.num_k, storage_}, with_bias ? operands_.bias.data() : nullptr,
           with_residual ? residual.data() : nullptr, x.data(), count, y.data());
    return y;
  }

  Floats naive(bool with_bias, bool with_residual) const {
    const Shape& s = operands_.shape;
    Floats weight = operands_.weight;
    if (storage_ == Storage::kBfloat16) {
      for (float& value : weight) value = emulated::from_bfloat16(round_to_bfloat16(value));
    }
    Floats y(static_cast<std::size_t>(s.rows * s.columns));
    for (std::ptrdiff_t m = 0; m < s.rows; ++m) {
      for (std::ptrdiff_t n = 0; n < s.columns; ++n) {
        float value = promised(&operands_.x[m * s.num_k], &weight[n * s.num_k], s.num_k);
        if (with_bias) value += operands_.bias[n];
        if (with_residual) value += operands_.residual[m * s.columns + n];
        y[m * s.columns + n] = value;
      }
    }
    return y;
  }

 private:
  const Operands& operands_;
  Storage storage_;
  std::vector<char> packed_;
};

void check_shapes(Storage storage) {
  const Shape shapes[] = {{1, 1, 1},     {2, 31, 15},   {11, 255, 16}, {12, 256, 17}, {13, 257, 31},
                          {25, 65, 32},  {31, 96, 33},  {48, 3, 100},  {5, 513, 3},   {49, 600, 70},
                          {130, 100, 97}, {145, 40, 33}, {300, 12, 5},  {3, 900, 200}};
  for (const Shape& shape : shapes) {
    const Operands o(shape, static_cast<unsigned>(shape.rows));
    const Layer layer(o, storage);
    for (int options = 0; options < 4; ++options) {
      report.expect_equal(layer.run(0, shape.rows, options & 1, options & 2), layer.naive(options & 1, options & 2),
                          checks::describe(name_of(storage), shape));
    }
  }
}

void check_rows_alone(Storage storage, const Shape& shape) {
  const Operands o(shape);
  const Layer layer(o, storage);
  checks::expect_rows_alone(report, name_of(storage), shape,
                            [&](std::ptrdiff_t first, std::ptrdiff_t count) { return layer.run(first, count); });
}

void check_threads(Storage storage) {
  for (const Shape& shape : {Shape{1, 100, 300}, Shape{40, 100, 300}, Shape{160, 300, 100}}) {
    const Operands o(shape);
    const Layer layer(o, storage);
    const Floats expected = layer.run(0, shape.rows);
    for (int threads : {2, 3, 5}) {
      set_num_threads(threads);
      report.expect_equal(layer.run(0, shape.rows), expected, checks::describe(name_of(storage), shape, "threads"));
    }
    set_num_threads(1);
  }
}

// Negative control: the comparison by bits notices another order of the same sums.
void check_control() {
  Operands o({4, 200, 40});
  const Floats y = Layer(o, Storage::kFloat32).run(0, 4);
  for (std::ptrdiff_t m = 0; m < 4; ++m) std::reverse(&o.x[m * 200], &o.x[m * 200] + 200);
  for (std::ptrdiff_t n = 0; n < 40; ++n) std::reverse(&o.weight[n * 200], &o.weight[n * 200] + 200);
  report.expect(Layer(o, Storage::kFloat32).run(0, 4) != y, "another order has other bits");
}

}  // namespace

int main() {
  for (Storage storage : {Storage::kFloat32, Storage::kBfloat16}) {
    check_shapes(storage);
    check_rows_alone(storage, {130, 33, 17});
    check_threads(storage);
  }
  check_control();
  return report.finish("avx512");
}
