"""How near the linear kernels come to what the machine can do: bfloat16 and int8 weights, at the worker's shapes.

    python benchmarks/linear.py --threads 1 --rows 1,16,1024

Many rows are bound by multiplying, one to six by reading the weight, so a line has both rates; the last lines have the
machine's own, measured before and after in the same run (`antiphon.machine`: the best that products under bfloat16
weights have, in registers where that can be measured, and reading). int8 may pass the former: its instruction
multiplies twice as much. The least of several repeats is shown, for a busy
machine only makes times longer. A shape is timed only after its products have been compared with float64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from antiphon.evaluation.summary import markdown_table
from antiphon.kernels import native
from antiphon.kernels.native_int8 import pack_int8_linear
from antiphon.kernels.ops import PackedLinear
from antiphon.machine import measure_rates

# Qwen2.5 0.5B and 1.5B: (inputs, outputs) of q, k and v; of o; of gate and up; of down.
SHAPES = {
    "0.5B": ((896, 1152), (896, 896), (896, 9728), (4864, 896)),
    "1.5B": ((1536, 2048), (1536, 1536), (1536, 17920), (8960, 1536)),
}
_LARGEST_ERROR = {"bf16": 0.005, "int8": 0.02}  # root mean square, against that of the product


def main() -> int:
    """Compare, time and print one table; 1 where a product is wrong or there are no kernels."""
    arguments = _arguments()
    reason = native.available()
    if reason is not None:
        print(f"linear: {reason}", file=sys.stderr)
        return 1
    torch.set_num_threads(arguments.threads)
    native.set_num_threads(arguments.threads)
    rows = [int(count) for count in arguments.rows.split(",")]
    lines, before = [], measure_rates(torch.bfloat16)
    for model in arguments.models.split(","):
        for num_k, columns in SHAPES[model]:
            weight = torch.randn(columns, num_k).mul_(num_k**-0.5).bfloat16()
            layers = {"bf16": native.pack_linear(weight, storage="bfloat16"), "int8": pack_int8_linear(weight)}
            for name, layer in layers.items():
                error = relative_error(layer, weight)
                if not error < _LARGEST_ERROR[name]:
                    print(f"linear: {name} {num_k} x {columns} is wrong by {error:.3g}, not timed", file=sys.stderr)
                    return 1
            lines += [_line(model, weight, layers, count, arguments.seconds) for count in rows]
    after = measure_rates(torch.bfloat16)
    print(f"{native.isa()}, {arguments.threads} thread(s); GF/s: 2 x multiply-adds, GB/s: bytes of weight\n")
    header = ("model", "K x N", "rows", "bf16 ms", "GF/s", "GB/s", "int8 ms", "GF/s", "GB/s", "speed-up")
    print(markdown_table(header, lines))
    for when, rates in (("before", before), ("after", after)):
        peak, bandwidth = rates.matrix_flops_per_second / 1e9, rates.bandwidth_bytes_per_second / 1e9
        print(f"\nthis machine {when}: {peak:.0f} GF/s, {bandwidth:.1f} GB/s")
    return 0


def relative_error(layer: PackedLinear, weight: Tensor, rows: int = 13) -> float:
    """Root mean square error of a product of `rows` random rows against float64, relative to the product's own."""
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(0))
    exact = x.double() @ weight.double().T
    return float((layer(x).double() - exact).norm() / exact.norm())


def _line(model: str, weight: Tensor, layers: dict[str, PackedLinear], rows: int, seconds: float) -> tuple[str, ...]:
    x = torch.randn(rows, weight.shape[1])
    cells, times = [model, f"{weight.shape[1]} x {weight.shape[0]}", str(rows)], []
    for layer in layers.values():
        best = least_seconds(lambda layer=layer: layer(x), seconds)
        flops = 2.0 * rows * weight.numel()
        cells += [f"{best * 1e3:.3f}", f"{flops / best / 1e9:.0f}", f"{layer.num_bytes / best / 1e9:.1f}"]
        times.append(best)
    return (*cells, f"{times[0] / times[1]:.2f}")


def least_seconds(run: Callable[[], object], budget_seconds: float) -> float:
    """The shortest of at least five runs, and of as many as the budget allows."""
    best, repeats, deadline = float("inf"), 0, time.perf_counter() + budget_seconds
    while repeats < 5 or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best, repeats = min(best, time.perf_counter() - start), repeats + 1
    return best


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="0.5B,1.5B", help="comma-separated: 0.5B, 1.5B")
    parser.add_argument("--rows", default="1,6,16,128,1024", help="comma-separated numbers of rows")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on one product, at least five repeats")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
