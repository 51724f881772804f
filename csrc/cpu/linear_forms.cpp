#include "cpu/linear_forms.h"

#include <stdexcept>

#include "cpu/amx_linear.h"
#include "cpu/avx512_bf16_linear.h"
#include "cpu/cpu_features.h"

namespace antiphon::cpu {
namespace {

#if defined(__x86_64__)
// Whether bfloat16 is multiplied with bfloat16: both forms have one layout of weights, amx_linear.h's.
bool multiplies_bf16(Isa isa, Storage storage) {
  return (isa == Isa::kAmx || isa == Isa::kAvx512Bf16) && storage == Storage::kBfloat16;
}
#endif

const TileTable& tile_table(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAmx || isa == Isa::kAvx512Bf16 || isa == Isa::kAvx512) return kAvx512Tiles;
  if (isa == Isa::kAvx2) return kAvx2Tiles;
#else
  (void)isa;
#endif
  return kPortableTiles;
}

}  // namespace

Isa parse_isa(const std::string& name) {
  for (const std::string& supported : supported_isas()) {
    if (supported != name) continue;
    if (name == "amx") return Isa::kAmx;
    if (name == "avx512_bf16") return Isa::kAvx512Bf16;
    if (name == "avx512") return Isa::kAvx512;
    return name == "avx2" ? Isa::kAvx2 : Isa::kPortable;
  }
  throw std::invalid_argument("instruction set '" + name + "' is unknown or not on this machine");
}

std::size_t linear_packed_bytes(Isa isa, Storage storage, std::ptrdiff_t num_columns, std::ptrdiff_t num_k) {
#if defined(__x86_64__)
  if (multiplies_bf16(isa, storage)) return amx_bf16_packed_bytes(num_columns, num_k);
#else
  (void)isa;
#endif
  const std::ptrdiff_t padded_columns = (num_columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
  return static_cast<std::size_t>(padded_columns * num_k) * element_bytes(storage);
}

void linear_pack_rows(Isa isa, Storage storage, const float* rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows,
                      std::ptrdiff_t num_k, void* packed) {
#if defined(__x86_64__)
  if (multiplies_bf16(isa, storage)) return amx_bf16_pack_rows(rows, first_row, num_rows, num_k, packed);
#else
  (void)isa;
#endif
  pack_rows(rows, first_row, num_rows, num_k, storage, packed);
}

void run_linear(Isa isa, const PackedWeight& weight, const float* bias, const float* residual, const float* x,
                std::ptrdiff_t num_rows, float* y) {
#if defined(__x86_64__)
  if (multiplies_bf16(isa, weight.storage)) {
    const auto form = isa == Isa::kAmx ? amx_bf16_linear : avx512_bf16_linear;
    return form({weight.data, weight.num_columns, weight.num_k}, bias, residual, x, num_rows, y);
  }
#endif
  linear(tile_table(isa), weight, bias, residual, x, num_rows, y);
}

PackedWeight linear_columns(Isa isa, const PackedWeight& weight, std::ptrdiff_t first_column,
                            std::ptrdiff_t num_columns) {
  // All columns before a panel are whole panels, in every layout.
  const std::size_t skipped = linear_packed_bytes(isa, weight.storage, first_column, weight.num_k);
  return {static_cast<const char*>(weight.data) + skipped, num_columns, weight.num_k, weight.storage};
}

const Int8Form& int8_form(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAmx) return kAmxInt8Form;
  if (isa == Isa::kAvx512Bf16 || isa == Isa::kAvx512) return kAvx512Int8Form;
  if (isa == Isa::kAvx2) return kAvx2Int8Form;
#else
  (void)isa;
#endif
  return kPortableInt8Form;
}

}  // namespace antiphon::cpu
