"""Who computes each operation: candidates in order, the first that can serve is taken, the others say why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.kernels import native, reference, torch_cpu
from antiphon.kernels.ops import OPERATIONS, KernelContext, KernelSet, PackedLinear


@dataclass(frozen=True)
class Candidate:
    """One way to compute an operation. `reason` returns why it cannot serve, or None."""

    name: str
    reason: Callable[[KernelContext], str | None]
    kernel: Callable[..., Any]


@dataclass(frozen=True)
class OperationReport:
    """For `antiphon doctor`: every candidate of an operation, whether it serves, and why not."""

    operation: str
    candidates: tuple[tuple[str, bool, str], ...]


def candidates(operation: str) -> tuple[Candidate, ...]:
    """All candidates of an operation, in the order they are tried."""
    last = Candidate("reference", _serves, getattr(reference, operation))
    fast = {
        "linear": (
            Candidate("native", _native_linear_reason, _native_linear),
            Candidate("torch_onednn", _cpu_and(torch_cpu.linear_reason), torch_cpu.linear),
        ),
        "rms_norm": (Candidate("torch_cpu", _cpu_and(_serves), torch_cpu.rms_norm),),
        "rotary_and_store": (Candidate("torch_cpu", _cpu_and(_serves), torch_cpu.rotary_and_store),),
        "paged_attention": (Candidate("torch_flash", _cpu_and(_serves), torch_cpu.paged_attention),),
        "silu_and_mul": (Candidate("torch_cpu", _cpu_and(_serves), torch_cpu.silu_and_mul),),
    }
    return (*fast.get(operation, ()), last)


def choose_kernels(context: KernelContext, *, only: str | None = None) -> KernelSet:
    """The first serving candidate of every operation. `only="reference"` takes the oracle everywhere (for tests)."""
    chosen: dict[str, Callable[..., Any]] = {}
    known = {candidate.name for operation in OPERATIONS for candidate in candidates(operation)}
    if only is not None and only not in known:
        raise ValueError(f"no kernels are named {only!r}, there are {', '.join(sorted(known))}")
    for operation in OPERATIONS:
        for candidate in candidates(operation):
            wanted = only is None or candidate.name in (only, "reference")
            if wanted and candidate.reason(context) is None:
                chosen[operation] = candidate.kernel
                break
    return KernelSet(**chosen)


def report(context: KernelContext) -> list[OperationReport]:
    """Every operation with its candidates; the first that serves is the one in use."""
    reports = []
    for operation in OPERATIONS:
        rows = []
        for candidate in candidates(operation):
            reason = candidate.reason(context)
            rows.append((candidate.name, reason is None, reason or ""))
        reports.append(OperationReport(operation, tuple(rows)))
    return reports


def _native_linear_reason(context: KernelContext) -> str | None:
    if context.device != "cpu" or context.dtype != torch.float32:
        return f"computes float32 on the CPU only, asked for {context.dtype} on {context.device}"
    return native.available()


def _native_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return native.pack_linear(weight, bias, "bfloat16" if weight.dtype == torch.bfloat16 else "float32")


def _serves(context: KernelContext) -> str | None:
    return None


def _cpu_and(reason: Callable[[KernelContext], str | None]) -> Callable[[KernelContext], str | None]:
    def check(context: KernelContext) -> str | None:
        return reason(context) if context.device == "cpu" else "computes on the CPU only"

    return check
