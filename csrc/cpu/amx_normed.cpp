// See amx_normed.h for the numbers, amx_product.h for the blocking.
#if defined(__x86_64__)
#include "cpu/amx_normed.h"

#include "cpu/amx_operands.h"
#include "cpu/amx_product.h"
#include "cpu/amx_sinks.h"

namespace antiphon::cpu {
namespace {

// Rows between the two products: 2.4 MiB of h at 4,864; both weights are read once for them.
constexpr std::ptrdiff_t kMlpRows = 256;

// 2^x within 8e-5 of itself: next to nothing beside the rounding to bfloat16, 4e-3.
ANTIPHON_AMX ANTIPHON_INLINE __m512 exp2_roughly(__m512 x) {
  constexpr int kPastFloor = 0x09;  // x - floor(x)
  const __m512 f = _mm512_reduce_ps(x, kPastFloor);
  __m512 p = _mm512_set1_ps(0x1.3f9670p-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.cefc70p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.644448p-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.fff632p-1f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

// Where the exponential is infinite its reciprocal is 0, and so is the result of a finite gate: up comes last, so that
// gate * up cannot be infinite first.
ANTIPHON_AMX ANTIPHON_INLINE __m512 silu_and_mul(__m512 gate, __m512 up) {
  const __m512 exp = exp2_roughly(_mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504f)));
  const __m512 sigmoid = _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), exp));  // within 6e-5
  return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), up);
}

// gate in the left half of a panel, up in the right one: 16 values of h.
ANTIPHON_AMX ANTIPHON_INLINE void store_gated(__m512 gate, __m512 up, void* out) {
  const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(silu_and_mul(gate, up));
  _mm256_storeu_si256(static_cast<__m256i*>(out), narrow);
}

// To the packed x of the next product, whose steps have two panels each.
struct GatedBf16 {
  const amx::Chunk& out;

  ANTIPHON_AMX ANTIPHON_INLINE char* at(std::ptrdiff_t row, std::ptrdiff_t column) const {
    const std::ptrdiff_t panel = column / amx::kPanelColumns;
    return out.line(row - out.first_row, panel / 2) + panel % 2 * 2 * kGatedColumns;
  }
  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void fetch(std::ptrdiff_t row, std::ptrdiff_t column) const {
    const char* lines = at(row, column);
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) __builtin_prefetch(lines + i * amx::kLineBytes, 1);
  }
  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void write(std::ptrdiff_t row, std::ptrdiff_t column, const char* sums) const {
    char* lines = at(row, column);
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i, sums += amx::kLineBytes) {
      store_gated(_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + amx::kTileBytes), lines + i * amx::kLineBytes);
    }
  }
};

// To rows of bfloat16, which are quantised once they are whole.
struct GatedInt8 {
  const float* w_scales;  // [32 x panels]
  const float* x_scales;  // [rows]
  std::uint16_t* out;     // [rows from first_row on][row_stride]
  std::ptrdiff_t first_row;
  std::ptrdiff_t row_stride;

  ANTIPHON_AMX ANTIPHON_INLINE std::uint16_t* at(std::ptrdiff_t row, std::ptrdiff_t column) const {
    return out + (row - first_row) * row_stride + column / 2;
  }
  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void fetch(std::ptrdiff_t row, std::ptrdiff_t column) const {
    const std::uint16_t* values = at(row, column);
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i) __builtin_prefetch(values + i * row_stride, 1);
  }
  template <int kRows>
  ANTIPHON_AMX ANTIPHON_INLINE void write(std::ptrdiff_t row, std::ptrdiff_t column, const char* sums) const {
    std::uint16_t* values = at(row, column);
    ANTIPHON_UNROLL(4)
    for (int i = 0; i < kRows; ++i, sums += amx::kLineBytes) {
      const __m512 scale = _mm512_set1_ps(x_scales[row + i]);
      store_gated(scaled(sums, scale, w_scales + column), scaled(sums + amx::kTileBytes, scale, w_scales + column + 16),
                  values + i * row_stride);
    }
  }

  ANTIPHON_AMX ANTIPHON_INLINE static __m512 scaled(const char* sums, __m512 x_scale, const float* w_scale) {
    const __m512 value = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums));
    return _mm512_mul_ps(value, _mm512_mul_ps(x_scale, _mm512_loadu_ps(w_scale)));
  }
};

// The two products' shapes. A panel of gate and up makes 16 columns of h.
struct Steps {
  amx::StepPlan wide, down;
  std::ptrdiff_t wide_panels, down_panels;

  ANTIPHON_INLINE std::ptrdiff_t chunk_rows(std::ptrdiff_t num_rows) const { return std::min(num_rows, kMlpRows); }
};

template <typename Weight>
Steps steps_of(const Weight& gate_up, const Weight& down, std::ptrdiff_t step_k) {
  return {amx::StepPlan(ceil_div(gate_up.num_k, step_k)), amx::StepPlan(ceil_div(down.num_k, step_k)),
          ceil_div(gate_up.num_columns, amx::kPanelColumns), ceil_div(down.num_columns, amx::kPanelColumns)};
}

// With an odd number of panels the last step of h is half written: the rest is zeros.
void clear_last_half(const amx::Chunk& h) {
  for (std::ptrdiff_t row = 0; row < h.num_rows; ++row) {
    std::memset(h.line(row, h.num_steps - 1) + 2 * kGatedColumns, 0, 2 * kGatedColumns);
  }
}

}  // namespace

void amx_bf16_normed(const AmxBf16Weight& weight, const float* bias, const RowNorm& norm, const float* x,
                     std::ptrdiff_t num_rows, float* y) {
  if (num_rows == 0) return;
  amx::run_product<amx::Bf16Tiles>(
      amx::FloatsToBf16<amx::NormedRows>{{x, weight.num_k, norm.weight, norm.eps}},
      amx::FloatSums{bias, nullptr, y, weight.num_columns, {y, num_rows, weight.num_columns}}, weight.data,
      amx::Shape{num_rows, weight.num_columns, ceil_div(weight.num_k, kAmxBf16StepK)});
}

void amx_int8_normed(const Int8Weight& weight, const float* bias, const RowNorm& norm, const float* x,
                     std::ptrdiff_t num_rows, float* y) {
  if (num_rows == 0) return;
  thread_local Workspace workspace;
  float* scales = workspace.at_least<float>(num_rows);
  amx::run_product<amx::Int8Tiles>(
      amx::FloatsToInt8<amx::NormedRows>{{x, weight.num_k, norm.weight, norm.eps}, weight.levels, scales},
      amx::Int8Sums{weight, scales, bias, nullptr, y, {y, num_rows, weight.num_columns}}, weight.panels,
      amx::Shape{num_rows, weight.num_columns, ceil_div(weight.num_k, amx::kInt8StepK)});
}

void amx_bf16_mlp(const AmxBf16Weight& gate_up, const AmxBf16Weight& down, const RowNorm& norm, const float* x,
                  std::ptrdiff_t num_rows, float* y) {
  if (num_rows == 0) return;
  const Steps steps = steps_of(gate_up, down, kAmxBf16StepK);
  const std::ptrdiff_t chunk_rows = steps.chunk_rows(num_rows);
  thread_local Workspace workspace;
  const std::ptrdiff_t x_bytes = amx::Chunk::bytes(chunk_rows, steps.wide.num_steps);
  char* packed = workspace.at_least<char>(x_bytes + amx::Chunk::bytes(chunk_rows, steps.down.num_steps));
  const amx::FloatSums sums{nullptr, x, y, down.num_columns, {y, num_rows, down.num_columns}};
  for (std::ptrdiff_t row = 0; row < num_rows; row += chunk_rows) {
    const std::ptrdiff_t rows = std::min(chunk_rows, num_rows - row);
    const amx::Chunk in{packed, row, rows, steps.wide.num_steps};
    const amx::Chunk h{packed + x_bytes, row, rows, steps.down.num_steps};
    in.pack(amx::FloatsToBf16<amx::NormedRows>{{x, gate_up.num_k, norm.weight, norm.eps}});
    h.clear_padding();
    if (steps.wide_panels % 2 != 0) clear_last_half(h);
    amx::multiply_chunk<amx::Bf16Tiles>(GatedBf16{h}, in, gate_up.data, steps.wide, steps.wide_panels);
    amx::multiply_chunk<amx::Bf16Tiles>(sums, h, down.data, steps.down, steps.down_panels);
  }
}

void amx_int8_mlp(const Int8Weight& gate_up, const Int8Weight& down, const RowNorm& norm, std::ptrdiff_t block,
                  const float* x, std::ptrdiff_t num_rows, float* y) {
  if (num_rows == 0) return;
  const Steps steps = steps_of(gate_up, down, amx::kInt8StepK);
  const std::ptrdiff_t chunk_rows = steps.chunk_rows(num_rows);
  const std::ptrdiff_t h_stride = steps.down.num_steps * amx::kInt8StepK;
  const std::ptrdiff_t written = steps.wide_panels * kGatedColumns;
  thread_local Workspace bytes, scale_memory;
  const std::ptrdiff_t x_bytes =
      amx::Chunk::bytes(chunk_rows, std::max(steps.wide.num_steps, steps.down.num_steps));  // one after the other
  char* packed = bytes.at_least<char>(x_bytes + 2 * chunk_rows * h_stride);
  std::uint16_t* h = reinterpret_cast<std::uint16_t*>(packed + x_bytes);
  float* scales = scale_memory.at_least<float>(2 * num_rows);
  float* h_scales = scales + num_rows;
  const amx::Int8Sums sums{down, h_scales, nullptr, x, y, {y, num_rows, down.num_columns}};
  for (std::ptrdiff_t row = 0; row < num_rows; row += chunk_rows) {
    const std::ptrdiff_t rows = std::min(chunk_rows, num_rows - row);
    const amx::Chunk in{packed, row, rows, steps.wide.num_steps};
    in.pack(amx::FloatsToInt8<amx::NormedRows>{{x, gate_up.num_k, norm.weight, norm.eps}, gate_up.levels, scales});
    for (std::ptrdiff_t i = 0; i < rows && written < h_stride; ++i) {
      std::memset(h + i * h_stride + written, 0, static_cast<std::size_t>(2 * (h_stride - written)));
    }
    amx::multiply_chunk<amx::Int8Tiles>(GatedInt8{gate_up.scales, scales, h, row, h_stride}, in, gate_up.panels,
                                        steps.wide, steps.wide_panels);
    const amx::Chunk next{packed, row, rows, steps.down.num_steps};
    next.pack(amx::Bf16ToInt8{h, row, h_stride, down.num_k, block, down.levels, h_scales});
    amx::multiply_chunk<amx::Int8Tiles>(sums, next, down.panels, steps.down, steps.down_panels);
  }
}

}  // namespace antiphon::cpu
#endif
