"""How near paged attention comes to what the machine can do: reads against the tiles' peak, decode against memory.

    taskset -c 1 python benchmarks/attention.py

One thread, the heads of Qwen2.5-0.5B, keys and values in bfloat16 and int8, the AMX form beside the AVX2 form. A read
is of 1,024 tokens, and its GFLOP/s count what the causal edge leaves. Decode is of 16 rows that share nothing, in as
many layers as it takes to fall out of the caches, and its GB/s count the keys and values. `antiphon.machine`
measures the tiles' peak and the rate of reading in the same run, before and after. The least of several repeats is
shown, for a busy machine only makes times longer. Nothing is timed before its output has been compared with float64.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.evaluation.summary import markdown_table
from antiphon.kernels import native
from antiphon.kernels.native_attention import paged_attention
from antiphon.kernels.ops import AttentionPlan, LayerCache
from antiphon.kernels.reference import stored_form
from antiphon.machine import measure_bandwidth, measure_register_rate

PAGE = 64
_LARGEST_ERROR = 0.02  # root mean square, against that of the output
_COLD_BYTES = 400 << 20


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    new: int
    context: int

    def plan(self, layer: int = 0) -> AttentionPlan:
        """Every row's pages lie scattered over the pool."""
        pages = -(-(self.context + self.new) // PAGE)
        order = torch.randperm(self.rows * pages, generator=torch.Generator().manual_seed(layer))
        starts = torch.arange(self.rows + 1) * self.new
        return AttentionPlan(
            order.view(self.rows, pages).int(), starts, torch.full((self.rows,), self.context, dtype=torch.int64)
        )

    def num_slots(self) -> int:
        return self.rows * -(-(self.context + self.new) // PAGE) * PAGE

    def seen(self) -> int:
        """Pairs of query token and key."""
        return self.rows * (self.new * self.context + self.new * (self.new + 1) // 2)


CASES = (
    Case("read 1,024 at 0", 1, 1024, 0),
    Case("read 1,024 at 3,072", 1, 1024, 3072),
    Case("decode 16 at 1,024", 16, 1, 1023),
    Case("decode 16 at 4,096", 16, 1, 4095),
)


def main() -> int:
    """Compare, time and print one table; 1 where an output is wrong or there are no kernels."""
    arguments = _arguments()
    reason = native.available()
    if reason is not None:
        print(f"attention: {reason}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    native.set_num_threads(1)
    isas = [name for name in ("amx", "avx512_bf16", "avx2") if name in native.supported_isas()]
    before = machine_rates(isas[0])
    lines = []
    for case in CASES:
        if arguments.only not in case.name:
            continue
        for dtype in (torch.bfloat16, torch.int8):
            lines += _lines(case, dtype, isas, arguments, before)
    after = machine_rates(isas[0])
    header = ("case", "storage", "form", "ms", "GFLOP/s", "of peak", "GB/s", "of reading")
    print(markdown_table(header, lines))
    for name, (flops, rate) in (("before", before), ("after", after)):
        print(f"one thread, {name}: registers {flops / 1e9:.0f} GFLOP/s, reading {rate / 1e9:.1f} GB/s")
    return 0


def _lines(
    case: Case, dtype: torch.dtype, isas: list[str], arguments: argparse.Namespace, rates: tuple[float, float]
) -> list[tuple[str, ...]]:
    heads, kv_heads, head_dim = arguments.heads, arguments.kv_heads, arguments.head_dim
    q = torch.randn(case.rows * case.new, heads, head_dim)
    first = _cache(kv_heads, case.num_slots(), head_dim, dtype)
    num_bytes = 2 * first.k.numel() * first.k.element_size()
    num_layers = max(1, _COLD_BYTES // num_bytes) if case.new == 1 else 1
    layers = [
        first,
        *(LayerCache(*(None if x is None else x.clone() for x in vars(first).values())) for _ in range(num_layers - 1)),
    ]
    plan, lines = case.plan(), []
    for isa in isas:
        os.environ[native.ISA_VARIABLE] = isa
        plan.derived.clear()
        error = relative_error(q, first, plan, case)
        if not error < _LARGEST_ERROR:
            raise SystemExit(f"attention: {isa} {case.name} {dtype} is wrong by {error:.3g}, not timed")
        best = least_seconds(
            [lambda layer=layer: paged_attention(q, layer, plan) for layer in layers], arguments.seconds
        )
        flops = 4.0 * case.seen() * heads * head_dim
        read = num_bytes / best
        lines.append((
            case.name, str(dtype).removeprefix("torch."), isa, f"{best * 1e3:.2f}", f"{flops / best / 1e9:.0f}",
            f"{flops / best / rates[0]:.1%}", f"{read / 1e9:.1f}" if case.new == 1 else "",
            f"{read / rates[1]:.0%}" if case.new == 1 else "",
        ))  # fmt: skip
    return lines


def _cache(kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype) -> LayerCache:
    (k, k_scale), (v, v_scale) = (stored_form(torch.randn(kv_heads, num_slots, head_dim), dtype) for _ in range(2))
    return LayerCache(k, v, k_scale, v_scale) if dtype == torch.int8 else LayerCache(k, v)


def relative_error(q: Tensor, cache: LayerCache, plan: AttentionPlan, case: Case) -> float:
    """Root mean square error of some tokens of the last row against float64, relative to the output's own."""
    out = paged_attention(q, cache, plan).view(q.shape)[-3:].double()
    slots = (plan.block_tables[-1].long() * PAGE).unsqueeze(1) + torch.arange(PAGE)
    slots = slots.flatten()[: case.context + case.new]
    groups = q.shape[1] // cache.k.shape[0]
    k, v = (
        x[:, slots].double() * (1 if scale is None else scale[:, slots].double().unsqueeze(-1))
        for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    exact = []
    for back in range(min(3, case.new), 0, -1):
        end = slots.numel() - back + 1
        query = q[-back].double().view(-1, groups, q.shape[2])
        scores = query @ k[:, :end].transpose(1, 2) * q.shape[2] ** -0.5
        exact.append((torch.softmax(scores, -1) @ v[:, :end]).flatten(0, 1))
    right = torch.stack(exact)
    return float((out[-right.shape[0] :] - right).norm() / right.norm())


def least_seconds(runs: list[Callable[[], object]], budget_seconds: float) -> float:
    """The shortest of at least five runs, and of as many as the budget allows; the runs take turns."""
    best, repeats, deadline = float("inf"), 0, time.perf_counter() + budget_seconds
    while repeats < 5 + len(runs) or time.perf_counter() < deadline:
        start = time.perf_counter()
        runs[repeats % len(runs)]()
        best, repeats = min(best, time.perf_counter() - start), repeats + 1
    return best


def machine_rates(isa: str) -> tuple[float, float]:
    """FLOP/s of bfloat16 in registers and bytes/s of reading, on one thread."""
    os.environ[native.ISA_VARIABLE] = isa
    return measure_register_rate(torch.bfloat16), measure_bandwidth(_COLD_BYTES)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on one line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
