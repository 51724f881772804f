// The one bindings file: raw addresses in, nothing of torch compiled in. kernels/native.py checks what is passed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/amx_normed.h"
#include "cpu/attention.h"
#include "cpu/cpu_features.h"
#include "cpu/huge_pages.h"
#include "cpu/int8_planes.h"
#include "cpu/layer_ops.h"
#include "cpu/linear_forms.h"
#include "cpu/log_prob.h"
#include "cpu/machine_rates.h"
#include "cpu/pool.h"
#include "cpu/rotary_store.h"
#include "cpu/rotation.h"
#include "cpu/rounding.h"

namespace py = pybind11;
using namespace antiphon::cpu;

namespace {

using Address = std::uintptr_t;
using Size = std::ptrdiff_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

Storage parse_storage(const std::string& name) {
  if (name == "float32") return Storage::kFloat32;
  if (name == "bfloat16") return Storage::kBfloat16;
  throw py::value_error("storage is '" + name + "', it must be float32 or bfloat16");
}

void bind_pack_rows(Address rows, Size first_row, Size num_rows, Size num_k, const std::string& storage, Address packed,
                    const std::string& isa) {
  const Storage parsed = parse_storage(storage);
  const Isa form = parse_isa(isa);
  py::gil_scoped_release release;
  linear_pack_rows(form, parsed, pointer<const float>(rows), first_row, num_rows, num_k, pointer<void>(packed));
}

// A packed linear layer: checked and resolved once, called many times.
class Linear {
 public:
  Linear(Address packed, Address bias, Size num_columns, Size num_k, const std::string& storage, const std::string& isa)
      : isa_(parse_isa(isa)),
        weight_{pointer<const void>(packed), num_columns, num_k, parse_storage(storage)},
        bias_(pointer<const float>(bias)) {}

  void run(Address x, Address residual, Size num_rows, Address y) const {
    py::gil_scoped_release release;
    run_linear(isa_, weight_, bias_, pointer<const float>(residual), pointer<const float>(x), num_rows,
               pointer<float>(y));
  }

  // A part of the columns, from a task of the pool: see StripLogits.
  void run_columns(const float* x, Size num_rows, Size first_column, Size num_columns, float* y) const {
    const PackedWeight part = linear_columns(isa_, weight_, first_column, num_columns);
    run_linear(isa_, part, bias_ != nullptr ? bias_ + first_column : nullptr, nullptr, x, num_rows, y);
  }

  Size num_k() const { return weight_.num_k; }

 private:
  Isa isa_;
  PackedWeight weight_;
  const float* bias_;
};

// ---- int8 linear (kernels/native_int8.py) ----

const Int8Form& parse_int8_form(const std::string& isa) { return int8_form(parse_isa(isa)); }

Size bind_int8_panels_bytes(Size num_columns, Size num_k, const std::string& isa) {
  const Int8Form& form = parse_int8_form(isa);
  return form.num_panels(num_columns) * form.panel_bytes(num_k);
}

std::int32_t bind_pack_int8_rows(Address rows, Size first_row, Size num_rows, Size num_k, Address panels,
                                 Address scales, const std::string& isa) {
  const Int8Form& form = parse_int8_form(isa);
  py::gil_scoped_release release;
  return pack_int8_rows(form, pointer<const float>(rows), first_row, num_rows, num_k, pointer<void>(panels),
                        pointer<float>(scales));
}

// A packed int8 linear layer: checked and resolved once, called many times. With fine panels (not 0) and with fine_x it
// has second planes.
class Int8Linear {
 public:
  Int8Linear(Address panels, Address scales, Address bias, Size num_columns, Size num_k, std::int32_t max_absolute_sum,
             Address fine_panels, Address fine_scales, std::int32_t fine_sum, bool fine_x, const std::string& isa)
      : form_(parse_int8_form(isa)),
        planes_{plane(panels, scales, num_columns, num_k, max_absolute_sum),
                plane(fine_panels, fine_scales, num_columns, num_k, fine_sum), fine_x},
        bias_(pointer<const float>(bias)) {}

  std::int32_t levels() const { return planes_.weight.levels; }

  void run(Address x, Size num_rows, Address residual, Address y) const {
    py::gil_scoped_release release;
    int8_linear(form_, planes_, bias_, pointer<const float>(x), num_rows, pointer<const float>(residual),
                pointer<float>(y));
  }

  // A part of the columns, from a task of the pool: see StripLogits.
  void run_columns(const float* x, Size num_rows, Size first_column, Size num_columns, float* y) const {
    const Int8Planes part = columns_of(form_, planes_, first_column, num_columns);
    int8_linear(form_, part, bias_ != nullptr ? bias_ + first_column : nullptr, x, num_rows, nullptr, y);
  }

  Size num_k() const { return planes_.weight.num_k; }

 private:
  Int8Weight plane(Address panels, Address scales, Size num_columns, Size num_k, std::int32_t sum) const {
    return {pointer<const void>(panels), pointer<const float>(scales), num_columns, num_k, int8_levels(form_, sum)};
  }

  const Int8Form& form_;
  Int8Planes planes_;
  const float* bias_;
};

void bind_int8_linear(py::module_& m) {
  m.attr("MAX_INT8_LINEAR_K") = kMaxInt8LinearK;
  m.def("int8_panels_bytes", &bind_int8_panels_bytes);
  m.def("pack_int8_rows", &bind_pack_int8_rows);
  m.def("int8_remainder", [](Address rows, Size num_rows, Size num_k) {
    py::gil_scoped_release release;
    int8_remainder(pointer<float>(rows), num_rows, num_k);
  });
  py::class_<Int8Linear>(m, "Int8Linear")
      .def(py::init<Address, Address, Address, Size, Size, std::int32_t, Address, Address, std::int32_t, bool,
                    const std::string&>())
      .def_property_readonly("levels", &Int8Linear::levels)
      .def("run", &Int8Linear::run);
}

// What follows a norm (kernels/native_normed.py): int8 where there are scales, else bfloat16.

Int8Weight amx_weight(Address panels, Address scales, std::int32_t max_absolute_sum, Size num_columns, Size num_k) {
  return {pointer<const void>(panels), pointer<const float>(scales), num_columns, num_k,
          int8_levels(int8_form(Isa::kAmx), max_absolute_sum)};
}

AmxBf16Weight as_bf16(const Int8Weight& weight) { return {weight.panels, weight.num_columns, weight.num_k}; }

void require_amx(const std::string& isa) {
  if (parse_isa(isa) != Isa::kAmx) throw py::value_error("this kernel is for amx alone, asked for '" + isa + "'");
}

class NormedLinear {
 public:
  NormedLinear(Address panels, Address scales, std::int32_t max_absolute_sum, Address bias, Address norm, float eps,
               Size num_columns, Size num_k, const std::string& isa)
      : weight_(amx_weight(panels, scales, max_absolute_sum, num_columns, num_k)),
        bias_(pointer<const float>(bias)),
        norm_{pointer<const float>(norm), eps} {
    require_amx(isa);
  }

  void run(Address x, Size num_rows, Address y) const {
    py::gil_scoped_release release;
#if defined(__x86_64__)
    const float* rows = pointer<const float>(x);
    if (weight_.scales != nullptr) return amx_int8_normed(weight_, bias_, norm_, rows, num_rows, pointer<float>(y));
    amx_bf16_normed(as_bf16(weight_), bias_, norm_, rows, num_rows, pointer<float>(y));
#endif
  }

 private:
  Int8Weight weight_;
  const float* bias_;
  RowNorm norm_;
};

class GatedMlp {
 public:
  GatedMlp(Address gate_up, Address gate_up_scales, std::int32_t gate_up_sum, Address down, Address down_scales,
           std::int32_t down_sum, Address norm, float eps, Size num_k, Size size, Size block, const std::string& isa)
      : gate_up_(amx_weight(gate_up, gate_up_scales, gate_up_sum, 2 * round_up(size, kGatedColumns), num_k)),
        down_(amx_weight(down, down_scales, down_sum, num_k, size)),
        norm_{pointer<const float>(norm), eps},
        block_(block) {
    require_amx(isa);
  }

  void run(Address x, Size num_rows, Address y) const {
    py::gil_scoped_release release;
#if defined(__x86_64__)
    const float* rows = pointer<const float>(x);
    if (down_.scales != nullptr) {
      return amx_int8_mlp(gate_up_, down_, norm_, block_, rows, num_rows, pointer<float>(y));
    }
    amx_bf16_mlp(as_bf16(gate_up_), as_bf16(down_), norm_, rows, num_rows, pointer<float>(y));
#endif
  }

 private:
  Int8Weight gate_up_;
  Int8Weight down_;
  RowNorm norm_;
  Size block_;
};

void bind_normed(py::module_& m) {
  py::class_<NormedLinear>(m, "NormedLinear")
      .def(py::init<Address, Address, std::int32_t, Address, Address, float, Size, Size, const std::string&>())
      .def("run", &NormedLinear::run);
  py::class_<GatedMlp>(m, "GatedMlp")
      .def(py::init<Address, Address, std::int32_t, Address, Address, std::int32_t, Address, float, Size, Size, Size,
                    const std::string&>())
      .def("run", &GatedMlp::run);
}

// Attention and rotary_and_store: kernels/native_attention.py, kernels/native_rotary.py.

KvStorage parse_kv_storage(const std::string& name) {
  if (name == "float32") return KvStorage::kFloat32;
  if (name == "bfloat16") return KvStorage::kBfloat16;
  if (name == "int8") return KvStorage::kInt8;
  throw py::value_error("storage is '" + name + "', it must be float32, bfloat16 or int8");
}

const AttentionForm& parse_attention_isa(const std::string& isa, KvStorage storage) {
  const Isa parsed = parse_isa(isa);
  static_cast<void>(storage);
#if defined(__x86_64__)
  if (parsed == Isa::kAmx && storage != KvStorage::kFloat32) return kAmxAttention;
  if (parsed == Isa::kAvx512Bf16 && storage != KvStorage::kFloat32) return kAvx512Bf16Attention;
  if (parsed != Isa::kPortable) return kAvx2Attention;  // AVX-512 without BF16 has no form of its own
#endif
  static_cast<void>(parsed);
  return kPortableAttention;
}

// The shapes of a model's caches, and the addresses of one layer's.
struct KvShape {
  KvStorage storage;
  Size num_kv_heads;
  Size num_slots;
  Size head_dim;

  KvShape(const std::string& storage_name, Size kv_heads, Size slots, Size size)
      : storage(parse_kv_storage(storage_name)), num_kv_heads(kv_heads), num_slots(slots), head_dim(size) {}

  KvLayer layer(Address k, Address v, Address k_scale, Address v_scale) const {
    return {pointer<void>(k), pointer<void>(v), pointer<float>(k_scale), pointer<float>(v_scale),
            storage,          num_kv_heads,     num_slots,               head_dim};
  }
};

// A batch's plan under one model: checked and resolved once, run by every layer.
class PlannedAttention {
 public:
  PlannedAttention(Address block_tables, Size table_pages, Address row_starts, Address context_tokens, Size num_rows,
                   Size num_heads, const KvShape& shape, const std::string& isa)
      : form_(parse_attention_isa(isa, shape.storage)),
        shape_(shape),
        plan_(pointer<const std::int32_t>(block_tables), table_pages, pointer<const std::int64_t>(row_starts),
              pointer<const std::int64_t>(context_tokens), num_rows, shape.num_slots / kPageKeys,
              num_heads / shape.num_kv_heads, shape.num_kv_heads, num_threads(), form_.cut) {}

  Size num_tokens() const { return plan_.num_tokens(); }
  std::size_t num_items() const { return plan_.items().size(); }

  void run(Address q, Address k, Address v, Address k_scale, Address v_scale, Address out) const {
    py::gil_scoped_release release;
    paged_attention(form_, plan_, shape_.layer(k, v, k_scale, v_scale), pointer<const float>(q), pointer<float>(out));
  }

 private:
  const AttentionForm& form_;
  KvShape shape_;
  AttentionPlan plan_;
};

bool bind_rotary_and_store(Address q, Size q_token_stride, Address k, Size k_token_stride, Address v,
                           Size v_token_stride, Address cos, Address sin, Address slots, Size num_tokens,
                           Size num_heads, const KvShape& shape, Address k_pool, Address v_pool, Address k_scale,
                           Address v_scale, Address q_out) {
  const RotaryInput input{pointer<const float>(q),   pointer<const float>(k),
                          pointer<const float>(v),   q_token_stride,
                          k_token_stride,            v_token_stride,
                          pointer<const float>(cos), pointer<const float>(sin),
                          pointer<const std::int64_t>(slots), num_tokens, num_heads};
  py::gil_scoped_release release;
  return rotary_and_store(input, shape.layer(k_pool, v_pool, k_scale, v_scale), pointer<float>(q_out));
}

void bind_attention(py::module_& m) {
  py::class_<KvShape>(m, "KvShape")
      .def(py::init<const std::string&, Size, Size, Size>());
  py::class_<PlannedAttention>(m, "PlannedAttention")
      .def(py::init<Address, Size, Address, Address, Size, Size, const KvShape&, const std::string&>())
      .def_property_readonly("num_tokens", &PlannedAttention::num_tokens)
      .def_property_readonly("num_items", &PlannedAttention::num_items)
      .def("run", &PlannedAttention::run);
  m.def("rotary_and_store", &bind_rotary_and_store);
}

// ---- the rest of a layer (cpu/layer_ops.h, cpu/log_prob.h); Python side: kernels/native_layer.py ----

const LayerForm& parse_layer_form(const std::string& isa) {
  const Isa parsed = parse_isa(isa);
#if defined(__x86_64__)
  if (parsed != Isa::kPortable) return kAvx2LayerForm;  // AVX-512 and AMX have no form of their own
#endif
  static_cast<void>(parsed);
  return kPortableLayerForm;
}

// The form is resolved once; every call then takes addresses and sizes alone.
class LayerOps {
 public:
  explicit LayerOps(const std::string& isa) : form_(parse_layer_form(isa)) {}

  void rms_norm(Address x, Size num_outer, Size outer_stride, Size num_inner, Size inner_stride, Size size,
                Address weight, float eps, Address out) const {
    const StridedRows rows{pointer<const float>(x), num_outer, outer_stride, num_inner, inner_stride, size};
    py::gil_scoped_release release;
    antiphon::cpu::rms_norm(form_, rows, pointer<const float>(weight), eps, pointer<float>(out));
  }

  void silu_and_mul(Address gate_up, Size num_rows, Size size, Size block, Address out) const {
    py::gil_scoped_release release;
    antiphon::cpu::silu_and_mul(form_, pointer<const float>(gate_up), num_rows, size, block, pointer<float>(out));
  }

  void gather_rows(Address table, const std::string& storage, Size num_rows, Size size, Address ids, Size num_ids,
                   Address out) const {
    const TableType type = parse_storage(storage) == Storage::kFloat32 ? TableType::kFloat32 : TableType::kBfloat16;
    py::gil_scoped_release release;
    if (!antiphon::cpu::gather_rows(form_, pointer<const void>(table), type, num_rows, size,
                                    pointer<const std::int64_t>(ids), num_ids, pointer<float>(out))) {
      throw py::value_error("an id is not a row of the table, which has " + std::to_string(num_rows));
    }
  }

  // Head is a packed linear layer with num_k() and run_columns(), as Linear has.
  template <typename Head>
  void log_prob(const Head& head, Address x, Size num_rows, Address targets, Size num_columns, Address out) const {
    const auto logits = [&](const float* rows, Size count, Size first_column, Size width,
                            float* y) { head.run_columns(rows, count, first_column, width, y); };
    py::gil_scoped_release release;
    if (!antiphon::cpu::log_prob(form_, logits, pointer<const float>(x), num_rows, head.num_k(),
                                 pointer<const std::int64_t>(targets), num_columns, pointer<float>(out))) {
      throw py::value_error("a target is not among the " + std::to_string(num_columns) + " columns");
    }
  }

  // (largest value, its lowest index or -1, whether any value is NaN)
  py::tuple peak(Address values, Address allowed, Size size) const {
    Peak found;
    {
      py::gil_scoped_release release;
      found = form_.peak(pointer<const float>(values), pointer<const std::uint8_t>(allowed), size);
    }
    return py::make_tuple(found.value, found.index, found.has_nan);
  }

 private:
  const LayerForm& form_;
};

// signs and mix may be null; x has `lines` rows of `size`, or so many columns (kernels/native_layer.py).
void bind_rotate_channels(Address signs, Address mix, Size size, Size block, Address x, Size lines, bool columns) {
  const Rotation rotation{pointer<const float>(signs), pointer<const float>(mix), size, block};
  py::gil_scoped_release release;
  (columns ? rotate_columns : rotate_rows)(rotation, pointer<float>(x), lines);
}

void bind_layer_ops(py::module_& m) {
  m.def("rotate_channels", &bind_rotate_channels);
  py::class_<LayerOps>(m, "LayerOps")
      .def(py::init<const std::string&>(), py::arg("isa"))
      .def("rms_norm", &LayerOps::rms_norm)
      .def("silu_and_mul", &LayerOps::silu_and_mul)
      .def("gather_rows", &LayerOps::gather_rows)
      .def("log_prob", &LayerOps::log_prob<Linear>)
      .def("log_prob", &LayerOps::log_prob<Int8Linear>)
      .def("peak", &LayerOps::peak);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() =
      "Antiphon's C++ kernels. Call them through antiphon.kernels.native, which checks dtypes, shapes and strides.";
  m.def("supported_isas", &supported_isas);
  m.def("advise_huge_pages", &advise_huge_pages);
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, py::call_guard<py::gil_scoped_release>());
  m.def("pack_rows", &bind_pack_rows);
  m.def("packed_bytes", [](Size num_columns, Size num_k, const std::string& storage, const std::string& isa) {
    return linear_packed_bytes(parse_isa(isa), parse_storage(storage), num_columns, num_k);
  });
  py::class_<Linear>(m, "Linear")
      .def(py::init<Address, Address, Size, Size, const std::string&, const std::string&>())
      .def("run", &Linear::run);
  m.def("read_memory", [](Address data, Size num_bytes) {
    py::gil_scoped_release release;
    return read_memory(pointer<const void>(data), num_bytes);
  });
  m.def("multiply_registers", [](const std::string& isa, bool int8, Size num_rounds) {
    const Isa form = parse_isa(isa);
    if (form != Isa::kAmx && form != Isa::kAvx512Bf16) throw py::value_error("amx or avx512_bf16, not '" + isa + "'");
    py::gil_scoped_release release;
    return multiply_registers(form, int8, num_rounds);
  });
  bind_int8_linear(m);
  bind_normed(m);
  bind_attention(m);
  bind_layer_ops(m);
}
