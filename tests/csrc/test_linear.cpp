// The linear kernel against a loop in float64, in every form that this machine runs, over odd shapes.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "cpu/linear.h"
#include "cpu/pool.h"
#include "operands.h"

namespace {

using namespace antiphon::cpu;
using namespace antiphon::testing;

struct Shape {
  std::ptrdiff_t num_rows, num_columns, num_k;
};

constexpr Shape kShapes[] = {{1, 1, 1},    {2, 15, 255}, {5, 16, 256},  {6, 17, 257},
                             {7, 33, 40},  {13, 300, 9}, {150, 70, 70}, {301, 40, 513}};

struct Layer {
  Layer(const Shape& shape, Storage storage)
      : weight(values(shape.num_columns * shape.num_k, 1)),
        bias(values(shape.num_columns, 2)),
        data(element_bytes(storage) * static_cast<std::size_t>((shape.num_columns + 15) / 16 * 16 * shape.num_k)) {
    pack_rows(weight.data(), 0, shape.num_columns, shape.num_k, storage, data.data());
    packed = PackedWeight{data.data(), shape.num_columns, shape.num_k, storage};
  }
  std::vector<float> weight, bias;
  std::vector<char> data;  // exactly as long as the kernel may read
  PackedWeight packed;
};

bool is_right(const Shape& shape, const Layer& layer, const std::vector<float>& x, const std::vector<float>& residual,
              const std::vector<float>& y) {
  for (std::ptrdiff_t row = 0; row < shape.num_rows; ++row) {
    for (std::ptrdiff_t column = 0; column < shape.num_columns; ++column) {
      const std::ptrdiff_t place = row * shape.num_columns + column;
      double sum = layer.bias[static_cast<std::size_t>(column)] + residual[static_cast<std::size_t>(place)];
      for (std::ptrdiff_t k = 0; k < shape.num_k; ++k) {
        sum += static_cast<double>(x[static_cast<std::size_t>(row * shape.num_k + k)]) *
               layer.weight[static_cast<std::size_t>(column * shape.num_k + k)];
      }
      // Written so that a NaN is wrong.
      if (!(std::abs(y[static_cast<std::size_t>(place)] - sum) <= 1e-3)) return false;
    }
  }
  return true;
}

std::vector<float> run(const TileTable& tiles, const Shape& shape, const Layer& layer, const std::vector<float>& x,
                       const std::vector<float>& residual) {
  std::vector<float> y(residual.size(), std::numeric_limits<float>::quiet_NaN());
  linear(tiles, layer.packed, layer.bias.data(), residual.data(), x.data(), shape.num_rows, y.data());
  return y;
}

TEST(linear_is_right_and_has_the_same_bits_on_any_number_of_threads) {
  for (const Shape& shape : kShapes) {
    const std::vector<float> x = values(shape.num_rows * shape.num_k, 3);
    const std::vector<float> residual = values(shape.num_rows * shape.num_columns, 4);
    for (Storage storage : {Storage::kFloat32, Storage::kBfloat16}) {
      for (const TileTable* tiles : FORMS(kPortableTiles, kAvx2Tiles)) {
        set_num_threads(1);
        const Layer layer(shape, storage);
        const std::vector<float> y = run(*tiles, shape, layer, x, residual);
        CHECK(is_right(shape, layer, x, residual, y));
        set_num_threads(3);
        CHECK(Layer(shape, storage).data == layer.data);
        const std::vector<float> again = run(*tiles, shape, layer, x, residual);
        CHECK(std::memcmp(y.data(), again.data(), sizeof(float) * y.size()) == 0);
      }
    }
  }
}

TEST(linear_check_notices_a_residual_of_another_place) {
  const Shape shape{7, 33, 40};
  const Layer layer(shape, Storage::kFloat32);
  const std::vector<float> x = values(shape.num_rows * shape.num_k, 3);
  const std::vector<float> residual = values(shape.num_rows * shape.num_columns, 4);
  std::vector<float> other(residual.rbegin(), residual.rend());
  CHECK(!is_right(shape, layer, x, residual, run(kPortableTiles, shape, layer, x, other)));
}

}  // namespace
