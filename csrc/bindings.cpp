// The one bindings file: raw addresses in, nothing of torch compiled in. kernels/native.py checks what is passed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/cpu_features.h"
#include "cpu/linear_forms.h"
#include "cpu/pool.h"

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

 private:
  Isa isa_;
  PackedWeight weight_;
  const float* bias_;
};

// ---- int8 linear (kernels/native_int8.py) ----

const Int8Form& parse_int8_form(const std::string& isa) { return int8_form(parse_isa(isa)); }

std::int32_t bind_pack_int8_rows(std::uintptr_t rows, std::ptrdiff_t first_row, std::ptrdiff_t num_rows,
                                 std::ptrdiff_t num_k, std::uintptr_t panels, const std::string& isa) {
  const Int8Form& form = parse_int8_form(isa);
  py::gil_scoped_release release;
  return pack_int8_rows(form, pointer<const std::int8_t>(rows), first_row, num_rows, num_k, pointer<void>(panels));
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

 private:
  const Int8Form& form_;
  Int8Weight weight_;
  const float* bias_;
};

void bind_int8_linear(py::module_& m) {
  m.attr("MAX_INT8_LINEAR_K") = kMaxInt8LinearK;
  m.def("int8_panels_bytes", [](std::ptrdiff_t num_columns, std::ptrdiff_t num_k, const std::string& isa) {
    const Int8Form& form = parse_int8_form(isa);
    return form.num_panels(num_columns) * form.panel_bytes(num_k);
  }, py::arg("num_columns"), py::arg("num_k"), py::arg("isa"));
  m.def("pack_int8_rows", &bind_pack_int8_rows, py::arg("rows"), py::arg("first_row"), py::arg("num_rows"),
        py::arg("num_k"), py::arg("panels"), py::arg("isa"));
  py::class_<Int8Linear>(m, "Int8Linear")
      .def(py::init<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::ptrdiff_t, std::ptrdiff_t, std::int32_t,
                    const std::string&>(),
           py::arg("panels"), py::arg("scales"), py::arg("bias"), py::arg("num_columns"), py::arg("num_k"),
           py::arg("max_absolute_sum"), py::arg("isa"))
      .def_property_readonly("levels", &Int8Linear::levels)
      .def("run", &Int8Linear::run, py::arg("x"), py::arg("num_rows"), py::arg("residual"), py::arg("y"));
}

// ---- end of int8 linear ----

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
  bind_int8_linear(m);
}
