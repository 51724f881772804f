// The one bindings file: raw addresses in, nothing of torch compiled in. kernels/native.py checks what is passed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/amx_normed.h"
#include "cpu/attention.h"
#include "cpu/cpu_features.h"
#include "cpu/huge_pages.h"
#include "cpu/layer_ops.h"
#include "cpu/linear_forms.h"
#include "cpu/log_prob.h"
#include "cpu/machine_rates.h"
#include "cpu/pool.h"
#include "cpu/rotary_store.h"
#include "cpu/rounding.h"

namespace py = pybind11;
using namespace antiphon::cpu;

namespace {

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Storage parse_storage(const std::string& name) {
  if (name == "float32") return Storage::kFloat32;
  if (name == "bfloat16") return Storage::kBfloat16;
  throw py::value_error("storage is '" + name + "', it must be float32 or bfloat16");
}

void bind_pack_rows(std::uintptr_t rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t num_k,
                    const std::string& storage, std::uintptr_t packed, const std::string& isa) {
  const Storage parsed = parse_storage(storage);
  const Isa form = parse_isa(isa);
  py::gil_scoped_release release;
  linear_pack_rows(form, parsed, pointer<const float>(rows), first_row, num_rows, num_k, pointer<void>(packed));
}

// A packed linear layer: checked and resolved once, called many times.
class Linear {
 public:
  Linear(std::uintptr_t packed, std::uintptr_t bias, std::ptrdiff_t num_columns, std::ptrdiff_t num_k,
         const std::string& storage, const std::string& isa)
      : isa_(parse_isa(isa)),
        weight_{pointer<const void>(packed), num_columns, num_k, parse_storage(storage)},
        bias_(pointer<const float>(bias)) {}

  void run(std::uintptr_t x, std::uintptr_t residual, std::ptrdiff_t num_rows, std::uintptr_t y) const {
    py::gil_scoped_release release;
    run_linear(isa_, weight_, bias_, pointer<const float>(residual), pointer<const float>(x), num_rows,
               pointer<float>(y));
  }

  // A part of the columns, from a task of the pool: see StripLogits.
  void run_columns(const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t first_column, std::ptrdiff_t num_columns,
                   float* y) const {
    const PackedWeight part = linear_columns(isa_, weight_, first_column, num_columns);
    run_linear(isa_, part, bias_ != nullptr ? bias_ + first_column : nullptr, nullptr, x, num_rows, y);
  }

  std::ptrdiff_t num_k() const { return weight_.num_k; }

 private:
  Isa isa_;
  PackedWeight weight_;
  const float* bias_;
};

// ---- int8 linear (kernels/native_int8.py) ----

const Int8Form& parse_int8_form(const std::string& isa) { return int8_form(parse_isa(isa)); }

std::ptrdiff_t bind_int8_panels_bytes(std::ptrdiff_t num_columns, std::ptrdiff_t num_k, const std::string& isa) {
  const Int8Form& form = parse_int8_form(isa);
  return form.num_panels(num_columns) * form.panel_bytes(num_k);
}

std::int32_t bind_pack_int8_rows(std::uintptr_t rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows,
                                 std::ptrdiff_t num_k, std::uintptr_t panels, std::uintptr_t scales,
                                 const std::string& isa) {
  const Int8Form& form = parse_int8_form(isa);
  py::gil_scoped_release release;
  return pack_int8_rows(form, pointer<const float>(rows), first_row, num_rows, num_k, pointer<void>(panels),
                        pointer<float>(scales));
}

// A packed int8 linear layer: checked and resolved once, called many times.
class Int8Linear {
 public:
  Int8Linear(std::uintptr_t panels, std::uintptr_t scales, std::uintptr_t bias, std::ptrdiff_t num_columns,
             std::ptrdiff_t num_k, std::int32_t max_absolute_sum, const std::string& isa)
      : form_(parse_int8_form(isa)),
        weight_{pointer<const void>(panels), pointer<const float>(scales), num_columns, num_k,
                int8_levels(form_, max_absolute_sum)},
        bias_(pointer<const float>(bias)) {}

  std::int32_t levels() const { return weight_.levels; }

  void run(std::uintptr_t x, std::ptrdiff_t num_rows, std::uintptr_t residual, std::uintptr_t y) const {
    py::gil_scoped_release release;
    int8_linear(form_, weight_, bias_, pointer<const float>(x), num_rows, pointer<const float>(residual),
                pointer<float>(y));
  }

  // A part of the columns, from a task of the pool: see StripLogits.
  void run_columns(const float* x, std::ptrdiff_t num_rows, std::ptrdiff_t first_column, std::ptrdiff_t num_columns,
                   float* y) const {
    const Int8Weight part = columns_of(form_, weight_, first_column, num_columns);
    int8_linear(form_, part, bias_ != nullptr ? bias_ + first_column : nullptr, x, num_rows, nullptr, y);
  }

  std::ptrdiff_t num_k() const { return weight_.num_k; }

 private:
  const Int8Form& form_;
  Int8Weight weight_;
  const float* bias_;
};

void bind_int8_linear(py::module_& m) {
  m.attr("MAX_INT8_LINEAR_K") = kMaxInt8LinearK;
  m.def("int8_panels_bytes", &bind_int8_panels_bytes, py::arg("num_columns"), py::arg("num_k"), py::arg("isa"));
  m.def("pack_int8_rows", &bind_pack_int8_rows, py::arg("rows"), py::arg("first_row"), py::arg("num_rows"),
        py::arg("num_k"), py::arg("panels"), py::arg("scales"), py::arg("isa"));
  py::class_<Int8Linear>(m, "Int8Linear")
      .def(py::init<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::ptrdiff_t, std::ptrdiff_t, std::int32_t,
                    const std::string&>(),
           py::arg("panels"), py::arg("scales"), py::arg("bias"), py::arg("num_columns"), py::arg("num_k"),
           py::arg("max_absolute_sum"), py::arg("isa"))
      .def_property_readonly("levels", &Int8Linear::levels)
      .def("run", &Int8Linear::run, py::arg("x"), py::arg("num_rows"), py::arg("residual"), py::arg("y"));
}

// ---- end of int8 linear ----

// What follows a norm (kernels/native_normed.py): int8 where there are scales, else bfloat16.

Int8Weight amx_weight(std::uintptr_t panels, std::uintptr_t scales, std::int32_t max_absolute_sum,
                      std::ptrdiff_t num_columns, std::ptrdiff_t num_k) {
  return {pointer<const void>(panels), pointer<const float>(scales), num_columns, num_k,
          int8_levels(int8_form(Isa::kAmx), max_absolute_sum)};
}

AmxBf16Weight as_bf16(const Int8Weight& weight) { return {weight.panels, weight.num_columns, weight.num_k}; }

void require_amx(const std::string& isa) {
  if (parse_isa(isa) != Isa::kAmx) throw py::value_error("this kernel is for amx alone, asked for '" + isa + "'");
}

class NormedLinear {
 public:
  NormedLinear(std::uintptr_t panels, std::uintptr_t scales, std::int32_t max_absolute_sum, std::uintptr_t bias,
               std::uintptr_t norm, float eps, std::ptrdiff_t num_columns, std::ptrdiff_t num_k,
               const std::string& isa)
      : weight_(amx_weight(panels, scales, max_absolute_sum, num_columns, num_k)),
        bias_(pointer<const float>(bias)),
        norm_{pointer<const float>(norm), eps} {
    require_amx(isa);
  }

  void run(std::uintptr_t x, std::ptrdiff_t num_rows, std::uintptr_t y) const {
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
  GatedMlp(std::uintptr_t gate_up, std::uintptr_t gate_up_scales, std::int32_t gate_up_sum, std::uintptr_t down,
           std::uintptr_t down_scales, std::int32_t down_sum, std::uintptr_t norm, float eps, std::ptrdiff_t num_k,
           std::ptrdiff_t size, const std::string& isa)
      : gate_up_(amx_weight(gate_up, gate_up_scales, gate_up_sum, 2 * round_up(size, kGatedColumns), num_k)),
        down_(amx_weight(down, down_scales, down_sum, num_k, size)),
        norm_{pointer<const float>(norm), eps} {
    require_amx(isa);
  }

  void run(std::uintptr_t x, std::ptrdiff_t num_rows, std::uintptr_t y) const {
    py::gil_scoped_release release;
#if defined(__x86_64__)
    const float* rows = pointer<const float>(x);
    if (down_.scales != nullptr) return amx_int8_mlp(gate_up_, down_, norm_, rows, num_rows, pointer<float>(y));
    amx_bf16_mlp(as_bf16(gate_up_), as_bf16(down_), norm_, rows, num_rows, pointer<float>(y));
#endif
  }

 private:
  Int8Weight gate_up_;
  Int8Weight down_;
  RowNorm norm_;
};

void bind_normed(py::module_& m) {
  using Address = std::uintptr_t;
  using Size = std::ptrdiff_t;
  py::class_<NormedLinear>(m, "NormedLinear")
      .def(py::init<Address, Address, std::int32_t, Address, Address, float, Size, Size, const std::string&>())
      .def("run", &NormedLinear::run);
  py::class_<GatedMlp>(m, "GatedMlp")
      .def(py::init<Address, Address, std::int32_t, Address, Address, std::int32_t, Address, float, Size, Size,
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
  if (parsed != Isa::kPortable) return kAvx2Attention;  // AVX-512 has no form of its own
#endif
  static_cast<void>(parsed);
  return kPortableAttention;
}

// The shapes of a model's caches, and the addresses of one layer's.
struct KvShape {
  KvStorage storage;
  std::ptrdiff_t num_kv_heads;
  std::ptrdiff_t num_slots;
  std::ptrdiff_t head_dim;

  KvShape(const std::string& storage_name, std::ptrdiff_t kv_heads, std::ptrdiff_t slots, std::ptrdiff_t size)
      : storage(parse_kv_storage(storage_name)), num_kv_heads(kv_heads), num_slots(slots), head_dim(size) {}

  KvLayer layer(std::uintptr_t k, std::uintptr_t v, std::uintptr_t k_scale, std::uintptr_t v_scale) const {
    return {pointer<void>(k), pointer<void>(v), pointer<float>(k_scale), pointer<float>(v_scale),
            storage,          num_kv_heads,     num_slots,               head_dim};
  }
};

// A batch's plan under one model: checked and resolved once, run by every layer.
class PlannedAttention {
 public:
  PlannedAttention(std::uintptr_t block_tables, std::ptrdiff_t table_pages, std::uintptr_t row_starts,
                   std::uintptr_t context_tokens, std::ptrdiff_t num_rows, std::ptrdiff_t num_heads,
                   const KvShape& shape, const std::string& isa)
      : form_(parse_attention_isa(isa, shape.storage)),
        shape_(shape),
        plan_(pointer<const std::int32_t>(block_tables), table_pages, pointer<const std::int64_t>(row_starts),
              pointer<const std::int64_t>(context_tokens), num_rows, shape.num_slots / kPageKeys,
              num_heads / shape.num_kv_heads, shape.num_kv_heads, num_threads(), form_.cut) {}

  std::ptrdiff_t num_tokens() const { return plan_.num_tokens(); }
  std::size_t num_items() const { return plan_.items().size(); }

  void run(std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::uintptr_t k_scale, std::uintptr_t v_scale,
           std::uintptr_t out) const {
    py::gil_scoped_release release;
    paged_attention(form_, plan_, shape_.layer(k, v, k_scale, v_scale), pointer<const float>(q), pointer<float>(out));
  }

 private:
  const AttentionForm& form_;
  KvShape shape_;
  AttentionPlan plan_;
};

bool bind_rotary_and_store(std::uintptr_t q, std::ptrdiff_t q_token_stride, std::uintptr_t k,
                           std::ptrdiff_t k_token_stride, std::uintptr_t v, std::ptrdiff_t v_token_stride,
                           std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t slots, std::ptrdiff_t num_tokens,
                           std::ptrdiff_t num_heads, const KvShape& shape, std::uintptr_t k_pool,
                           std::uintptr_t v_pool, std::uintptr_t k_scale, std::uintptr_t v_scale,
                           std::uintptr_t q_out) {
  const RotaryInput input{pointer<const float>(q),
                          pointer<const float>(k),
                          pointer<const float>(v),
                          q_token_stride,
                          k_token_stride,
                          v_token_stride,
                          pointer<const float>(cos),
                          pointer<const float>(sin),
                          pointer<const std::int64_t>(slots),
                          num_tokens,
                          num_heads};
  py::gil_scoped_release release;
  return rotary_and_store(input, shape.layer(k_pool, v_pool, k_scale, v_scale), pointer<float>(q_out));
}

void bind_attention(py::module_& m) {
  py::class_<KvShape>(m, "KvShape")
      .def(py::init<const std::string&, std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t>(), py::arg("storage"),
           py::arg("num_kv_heads"), py::arg("num_slots"), py::arg("head_dim"));
  py::class_<PlannedAttention>(m, "PlannedAttention")
      .def(py::init<std::uintptr_t, std::ptrdiff_t, std::uintptr_t, std::uintptr_t, std::ptrdiff_t, std::ptrdiff_t,
                    const KvShape&, const std::string&>(),
           py::arg("block_tables"), py::arg("table_pages"), py::arg("row_starts"), py::arg("context_tokens"),
           py::arg("num_rows"), py::arg("num_heads"), py::arg("shape"), py::arg("isa"))
      .def_property_readonly("num_tokens", &PlannedAttention::num_tokens)
      .def_property_readonly("num_items", &PlannedAttention::num_items)
      .def("run", &PlannedAttention::run, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("k_scale"),
           py::arg("v_scale"), py::arg("out"));
  m.def("rotary_and_store", &bind_rotary_and_store, py::arg("q"), py::arg("q_token_stride"), py::arg("k"),
        py::arg("k_token_stride"), py::arg("v"), py::arg("v_token_stride"), py::arg("cos"), py::arg("sin"),
        py::arg("slots"), py::arg("num_tokens"), py::arg("num_heads"), py::arg("shape"), py::arg("k_pool"),
        py::arg("v_pool"), py::arg("k_scale"), py::arg("v_scale"), py::arg("q_out"));
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

  void rms_norm(std::uintptr_t x, std::ptrdiff_t num_outer, std::ptrdiff_t outer_stride, std::ptrdiff_t num_inner,
                std::ptrdiff_t inner_stride, std::ptrdiff_t size, std::uintptr_t weight, float eps,
                std::uintptr_t out) const {
    const StridedRows rows{pointer<const float>(x), num_outer, outer_stride, num_inner, inner_stride, size};
    py::gil_scoped_release release;
    antiphon::cpu::rms_norm(form_, rows, pointer<const float>(weight), eps, pointer<float>(out));
  }

  void silu_and_mul(std::uintptr_t gate_up, std::ptrdiff_t num_rows, std::ptrdiff_t size, std::uintptr_t out) const {
    py::gil_scoped_release release;
    antiphon::cpu::silu_and_mul(form_, pointer<const float>(gate_up), num_rows, size, pointer<float>(out));
  }

  void gather_rows(std::uintptr_t table, const std::string& storage, std::ptrdiff_t num_rows, std::ptrdiff_t size,
                   std::uintptr_t ids, std::ptrdiff_t num_ids, std::uintptr_t out) const {
    const TableType type = parse_storage(storage) == Storage::kFloat32 ? TableType::kFloat32 : TableType::kBfloat16;
    py::gil_scoped_release release;
    if (!antiphon::cpu::gather_rows(form_, pointer<const void>(table), type, num_rows, size,
                                    pointer<const std::int64_t>(ids), num_ids, pointer<float>(out))) {
      throw py::value_error("an id is not a row of the table, which has " + std::to_string(num_rows));
    }
  }

  // Head is a packed linear layer with num_k() and run_columns(), as Linear has.
  template <typename Head>
  void log_prob(const Head& head, std::uintptr_t x, std::ptrdiff_t num_rows, std::uintptr_t targets,
                std::ptrdiff_t num_columns, std::uintptr_t out) const {
    const auto logits = [&](const float* rows, std::ptrdiff_t count, std::ptrdiff_t first_column, std::ptrdiff_t width,
                            float* y) { head.run_columns(rows, count, first_column, width, y); };
    py::gil_scoped_release release;
    if (!antiphon::cpu::log_prob(form_, logits, pointer<const float>(x), num_rows, head.num_k(),
                                 pointer<const std::int64_t>(targets), num_columns, pointer<float>(out))) {
      throw py::value_error("a target is not among the " + std::to_string(num_columns) + " columns");
    }
  }

  // (largest value, its lowest index or -1, whether any value is NaN)
  py::tuple peak(std::uintptr_t values, std::uintptr_t allowed, std::ptrdiff_t size) const {
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

void bind_layer_ops(py::module_& m) {
  py::class_<LayerOps>(m, "LayerOps")
      .def(py::init<const std::string&>(), py::arg("isa"))
      .def("rms_norm", &LayerOps::rms_norm)
      .def("silu_and_mul", &LayerOps::silu_and_mul)
      .def("gather_rows", &LayerOps::gather_rows)
      .def("log_prob", &LayerOps::log_prob<Linear>)
      .def("log_prob", &LayerOps::log_prob<Int8Linear>)
      .def("peak", &LayerOps::peak);
}

// ---- end of the rest of a layer ----

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Antiphon's C++ kernels. Call them through antiphon.kernels.native, which checks dtypes, shapes and strides.";
  m.def("supported_isas", &supported_isas);
  m.def("advise_huge_pages", &advise_huge_pages, py::arg("address"), py::arg("num_bytes"));
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
  m.def("pack_rows", &bind_pack_rows, py::arg("rows"), py::arg("first_row"), py::arg("num_rows"), py::arg("num_k"),
        py::arg("storage"), py::arg("packed"), py::arg("isa"));
  m.def("packed_bytes", [](std::ptrdiff_t num_columns, std::ptrdiff_t num_k, const std::string& storage,
                           const std::string& isa) {
    return linear_packed_bytes(parse_isa(isa), parse_storage(storage), num_columns, num_k);
  }, py::arg("num_columns"), py::arg("num_k"), py::arg("storage"), py::arg("isa"));
  py::class_<Linear>(m, "Linear")
      .def(py::init<std::uintptr_t, std::uintptr_t, std::ptrdiff_t, std::ptrdiff_t, const std::string&,
                    const std::string&>(),
           py::arg("packed"), py::arg("bias"), py::arg("num_columns"), py::arg("num_k"), py::arg("storage"),
           py::arg("isa"))
      .def("run", &Linear::run, py::arg("x"), py::arg("residual"), py::arg("num_rows"), py::arg("y"));
  m.def("read_memory", [](std::uintptr_t data, std::ptrdiff_t num_bytes) {
    py::gil_scoped_release release;
    return read_memory(pointer<const void>(data), num_bytes);
  }, py::arg("data"), py::arg("num_bytes"));
  m.def("multiply_tiles", [](bool int8, std::ptrdiff_t num_rounds) {
    parse_isa("amx");  // refused where the machine has none
    py::gil_scoped_release release;
    return multiply_tiles(int8, num_rounds);
  }, py::arg("int8"), py::arg("num_rounds"));
  bind_int8_linear(m);
  bind_normed(m);
  bind_attention(m);
  bind_layer_ops(m);
}
