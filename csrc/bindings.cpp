// The one bindings file: raw addresses in, nothing of torch compiled in. kernels/native.py checks what is passed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/attention.h"
#include "cpu/linear.h"
#include "cpu/pool.h"
#include "cpu/rotary_store.h"

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

// The forms this machine can run, the best first.
std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2");
#endif
  names.push_back("portable");
  return names;
}

const TileTable& parse_isa(const std::string& name) {
  for (const std::string& supported : supported_isas()) {
    if (supported != name) continue;
#if defined(__x86_64__)
    if (name == "avx2") return kAvx2Tiles;
#endif
    return kPortableTiles;
  }
  throw py::value_error("instruction set '" + name + "' is unknown or not on this machine");
}

// Asks for huge pages on the whole 2 MiB pages inside [address, address + num_bytes). A hint: failure changes nothing.
void advise_huge_pages(std::uintptr_t address, std::size_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHuge = std::uintptr_t{2} << 20;
  const std::uintptr_t first = (address + kHuge - 1) / kHuge * kHuge;
  const std::uintptr_t end = (address + num_bytes) / kHuge * kHuge;
  if (first < end) madvise(pointer<void>(first), end - first, MADV_HUGEPAGE);
#else
  (void)address;
  (void)num_bytes;
#endif
}

void bind_pack_rows(std::uintptr_t rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows, std::ptrdiff_t num_k,
                    const std::string& storage, std::uintptr_t packed) {
  const Storage parsed = parse_storage(storage);
  py::gil_scoped_release release;
  pack_rows(pointer<const float>(rows), first_row, num_rows, num_k, parsed, pointer<void>(packed));
}

// A packed linear layer: checked and resolved once, called many times.
class Linear {
 public:
  Linear(std::uintptr_t packed, std::uintptr_t bias, std::ptrdiff_t num_columns, std::ptrdiff_t num_k,
         const std::string& storage, const std::string& isa)
      : tiles_(parse_isa(isa)),
        weight_{pointer<const void>(packed), num_columns, num_k, parse_storage(storage)},
        bias_(pointer<const float>(bias)) {}

  void run(std::uintptr_t x, std::uintptr_t residual, std::ptrdiff_t num_rows, std::uintptr_t y) const {
    py::gil_scoped_release release;
    linear(tiles_, weight_, bias_, pointer<const float>(residual), pointer<const float>(x), num_rows,
           pointer<float>(y));
  }

 private:
  const TileTable& tiles_;
  PackedWeight weight_;
  const float* bias_;
};

// Attention and rotary_and_store: kernels/native_attention.py, kernels/native_rotary.py.

KvStorage parse_kv_storage(const std::string& name) {
  if (name == "float32") return KvStorage::kFloat32;
  if (name == "bfloat16") return KvStorage::kBfloat16;
  if (name == "int8") return KvStorage::kInt8;
  throw py::value_error("storage is '" + name + "', it must be float32, bfloat16 or int8");
}

const AttentionForm& parse_attention_isa(const std::string& isa) {
#if defined(__x86_64__)
  if (&parse_isa(isa) == &kAvx2Tiles) return kAvx2Attention;
#else
  parse_isa(isa);
#endif
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
      : form_(parse_attention_isa(isa)),
        shape_(shape),
        plan_(pointer<const std::int32_t>(block_tables), table_pages, pointer<const std::int64_t>(row_starts),
              pointer<const std::int64_t>(context_tokens), num_rows, shape.num_slots / kPageKeys,
              num_heads / shape.num_kv_heads, shape.num_kv_heads, num_threads()) {}

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

void bind_rotary_and_store(std::uintptr_t q, std::ptrdiff_t q_token_stride, std::uintptr_t k,
                           std::ptrdiff_t k_token_stride, std::uintptr_t v, std::ptrdiff_t v_token_stride,
                           std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t slots, std::ptrdiff_t num_tokens,
                           std::ptrdiff_t num_heads, const KvShape& shape, std::uintptr_t k_pool,
                           std::uintptr_t v_pool, std::uintptr_t k_scale, std::uintptr_t v_scale,
                           std::uintptr_t q_out) {
  py::gil_scoped_release release;
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
  rotary_and_store(input, shape.layer(k_pool, v_pool, k_scale, v_scale), pointer<float>(q_out));
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

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Antiphon's C++ kernels. Call them through antiphon.kernels.native, which checks dtypes, shapes and strides.";
  m.attr("PANEL_COLUMNS") = kPanelColumns;
  m.def("supported_isas", &supported_isas);
  m.def("advise_huge_pages", &advise_huge_pages, py::arg("address"), py::arg("num_bytes"));
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
  m.def("pack_rows", &bind_pack_rows, py::arg("rows"), py::arg("first_row"), py::arg("num_rows"), py::arg("num_k"),
        py::arg("storage"), py::arg("packed"));
  py::class_<Linear>(m, "Linear")
      .def(py::init<std::uintptr_t, std::uintptr_t, std::ptrdiff_t, std::ptrdiff_t, const std::string&,
                    const std::string&>(),
           py::arg("packed"), py::arg("bias"), py::arg("num_columns"), py::arg("num_k"), py::arg("storage"),
           py::arg("isa"))
      .def("run", &Linear::run, py::arg("x"), py::arg("residual"), py::arg("num_rows"), py::arg("y"));
  bind_attention(m);
}
