// Walsh-Hadamard transforms and rotations against float64, and the same bits in every form.
#include "check.h"
#include "cpu/hadamard.h"
#include "cpu/layer_ops.h"
#include "cpu/pool.h"
#include "cpu/rotation.h"
#include "operands.h"

namespace {

using namespace antiphon::cpu;
using namespace antiphon::testing;

double sign_of(std::ptrdiff_t i, std::ptrdiff_t j) {
  return __builtin_popcountll(static_cast<unsigned long long>(i & j)) % 2 == 0 ? 1.0 : -1.0;
}

double exact(const Floats& x, std::ptrdiff_t place, std::ptrdiff_t block) {
  const std::ptrdiff_t first = place / block * block;
  double sum = 0.0;
  for (std::ptrdiff_t j = 0; j < block; ++j) sum += sign_of(place - first, j) * x[static_cast<std::size_t>(first + j)];
  return sum / std::sqrt(static_cast<double>(block));
}

std::vector<const LayerForm*> forms() { return FORMS(kPortableLayerForm, kAvx2LayerForm); }

TEST(hadamard_blocks_of_every_size_are_right_and_have_the_same_bits_in_every_form) {
  for (std::ptrdiff_t block = 1; block <= 1024; block *= 2) {
    const std::ptrdiff_t size = 3 * block;
    const Floats x = values(size, 3);
    Floats wide = x;
    hadamard<Lanes16>(wide.data(), size, block);
    for (const LayerForm* form : forms()) {
      Floats y = x;
      form->hadamard(y.data(), size, block);
      bool good = same_bits(y, wide);
      for (std::ptrdiff_t i = 0; i < size; ++i) {
        good = good && near(y[static_cast<std::size_t>(i)], exact(x, i, block), 1e-5);
      }
      CHECK(good);
      if (block > 1) CHECK(!near(y[0], exact(x, 1, block), 1e-5));  // negative control: another output
    }
  }
}

// Rows of x, rotated as rows and, transposed, as columns: R is the same, to the bit of a sum's order.
TEST(rotations_of_rows_and_of_columns_are_right_on_any_threads) {
  constexpr std::ptrdiff_t kSizes[][2] = {{1, 1}, {7, 1}, {24, 8}, {96, 32}, {64, 64}, {320, 64}};
  for (const auto& [size, block] : kSizes) {
    const std::ptrdiff_t a = size / block;
    const Floats signs = values(size, 1), mix = values(a * a, 2), x = values(70 * size, 3);
    const Rotation rotation{signs.data(), mix.data(), size, block};
    Floats rows = x, columns(x.size()), threaded = x;
    for (std::ptrdiff_t i = 0; i < 70 * size; ++i) columns[static_cast<std::size_t>(i % size * 70 + i / size)] = x[i];
    rotate_rows(rotation, rows.data(), 70);
    rotate_columns(rotation, columns.data(), 70);
    set_num_threads(3);
    rotate_rows(rotation, threaded.data(), 70);
    set_num_threads(1);
    CHECK(same_bits(rows, threaded));
    bool good = true;
    for (std::ptrdiff_t row = 0; row < 70; ++row) {
      for (std::ptrdiff_t to = 0; to < size; ++to) {
        double sum = 0.0;
        for (std::ptrdiff_t from = 0; from < size; ++from) {
          sum += x[row * size + from] * static_cast<double>(signs[from]) * mix[from / block * a + to / block] *
                 sign_of(from % block, to % block);
        }
        sum /= std::sqrt(static_cast<double>(block));
        good = good && near(rows[row * size + to], sum, 1e-3) && near(columns[to * 70 + row], sum, 1e-3);
      }
    }
    CHECK(good);
  }
}

}  // namespace
