"""Who computes each operation: candidates in order, the first that can serve is taken, the others say why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from antiphon.kernels import (
    native,
    native_attention,
    native_cache,
    native_int8,
    native_layer,
    native_normed,
    native_rotary,
    reference,
    reference_int8,
    torch_cpu,
)
from antiphon.kernels.ops import ONE_PLANE, OPERATIONS, KernelContext, KernelSet, PackedLinear, Planes, Weight

Reason = Callable[[KernelContext], str | None]

COMPOSED: Mapping[str, str] = MappingProxyType(
    {
        "normed_linear": "composed of rms_norm and linear",
        "gated_mlp": "composed of rms_norm, linear and silu_and_mul",
    }
)  # who serves these operations where no kernel does


@dataclass(frozen=True)
class Candidate:
    """One way to compute an operation. `reason` returns why it cannot serve, or None. With `is_factory`, `kernel()`
    gives the kernel, once it has been chosen. No kernel (`COMPOSED`): the model makes the operation of others."""

    name: str
    reason: Reason
    kernel: Callable[..., Any] | None
    is_factory: bool = False


@dataclass(frozen=True)
class OperationReport:
    """For `antiphon doctor`: every candidate of an operation, whether it serves, and why not."""

    operation: str
    candidates: tuple[tuple[str, bool, str], ...]


def candidates(operation: str) -> tuple[Candidate, ...]:
    """All candidates of an operation, in the order they are tried. The last is the oracle or, where `COMPOSED` has the
    operation, what the model makes of others."""
    layer = Candidate("native", _all(_native_reason, _native_weight_reason), partial(_native_layer, operation), True)
    fast = {
        "embedding": (layer,),
        "linear": (
            Candidate("native", _all(_native_reason, _native_linear_reason), _native_linear),
            Candidate("native_int8", _all(_native_reason, _int8_reason), native_int8.pack_int8_linear),
            Candidate("torch_onednn", _cpu_and(torch_cpu.linear_reason), torch_cpu.linear),
            Candidate("reference_int8", _int8_reason, reference_int8.linear),
        ),
        "rms_norm": (layer, Candidate("torch_cpu", _cpu_and(_serves), torch_cpu.rms_norm)),
        "rotary_and_store": (
            Candidate("native", _all(_native_reason, _native_attention_reason), native_rotary.rotary_and_store),
            Candidate("torch_cpu", _cpu_and(_serves), torch_cpu.rotary_and_store),
        ),
        "paged_attention": (
            Candidate("native", _all(_native_reason, _native_attention_reason), native_attention.paged_attention),
            Candidate("torch_flash", _cpu_and(torch_cpu.attention_reason), torch_cpu.paged_attention),
        ),
        "silu_and_mul": (layer, Candidate("torch_cpu", _cpu_and(_serves), torch_cpu.silu_and_mul)),
        "rotate_channels": (layer,),
        "normed_linear": _normed(native_normed.pack_normed_linear, native_normed.pack_int8_normed_linear),
        "gated_mlp": _normed(native_normed.pack_gated_mlp, native_normed.pack_int8_gated_mlp),
        "log_prob": (layer,),
        "peak": (layer,),
    }
    return (*fast.get(operation, ()), _last(operation))


def _normed(pack: Callable[..., Any], pack_int8: Callable[..., Any]) -> tuple[Candidate, ...]:
    return (
        Candidate("native", _all(_native_reason, _bfloat16_reason, native_normed.reason), pack),
        Candidate("native_int8", _all(_native_reason, _int8_reason, native_normed.reason), pack_int8),
    )


def choose_kernels(context: KernelContext, *, only: str | None = None) -> KernelSet:
    """The first serving candidate of every operation. `only="reference"` takes the oracle everywhere (for tests); a
    name stands for its int8 form too. Raises `ValueError` with every candidate's reason where none can serve."""
    chosen: dict[str, Any] = {}
    every = [candidate for operation in OPERATIONS for candidate in candidates(operation)]
    known = {candidate.name.removesuffix("_int8") for candidate in every if candidate.kernel is not None}
    if only is not None and only not in known:
        raise ValueError(f"no kernels are named {only!r}, there are {', '.join(sorted(known))}")
    for operation in OPERATIONS:
        for candidate in candidates(operation):
            wanted = only is None or candidate.name.removesuffix("_int8") in (only, "reference", *COMPOSED.values())
            if wanted and candidate.reason(context) is None:
                chosen[operation] = (
                    candidate.kernel() if candidate.kernel and candidate.is_factory else candidate.kernel
                )
                break
        else:
            reasons = "; ".join(f"{name}: {reason}" for name, _, reason in _report(operation, context).candidates)
            raise ValueError(f"no kernel serves {operation} for {context} ({reasons})")
    return KernelSet(**chosen)


def report(context: KernelContext) -> list[OperationReport]:
    """Every operation with its candidates; the first that serves is the one in use."""
    return [_report(operation, context) for operation in OPERATIONS]


def _report(operation: str, context: KernelContext) -> OperationReport:
    reasons = [(candidate.name, candidate.reason(context)) for candidate in candidates(operation)]
    return OperationReport(operation, tuple((name, reason is None, reason or "") for name, reason in reasons))


def _last(operation: str) -> Candidate:
    if operation in COMPOSED:
        return Candidate(COMPOSED[operation], _serves, None)
    reason = reference.linear_reason if operation == "linear" else _serves
    return Candidate("reference", reason, getattr(reference, operation))


def _native_reason(context: KernelContext) -> str | None:
    """What holds for every native kernel."""
    if context.device != "cpu" or context.dtype != torch.float32:
        return f"computes float32 on the CPU only, asked for {context.dtype} on {context.device}"
    return native.available()


def _native_linear_reason(context: KernelContext) -> str | None:
    if context.weight_dtype not in (torch.float32, torch.bfloat16):
        return f"weights in {context.weight_dtype} are not served"
    return None


def _native_attention_reason(context: KernelContext) -> str | None:
    if context.kv_dtype not in native_cache.STORAGES:
        return f"keys and values in {context.kv_dtype} are not served"
    return None


def _native_weight_reason(context: KernelContext) -> str | None:
    """Why the native kernels of a layer would not have native products beside them, which `log_prob` needs."""
    if context.weight_dtype not in (torch.float32, torch.bfloat16, torch.int8):
        return f"weights in {context.weight_dtype} are not served"
    return None


def _native_layer(operation: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(native_layer.LayerOps(), operation)
    return kernel


def _int8_reason(context: KernelContext) -> str | None:
    return None if context.weight_dtype == torch.int8 else f"serves int8 weights only, asked for {context.weight_dtype}"


def _bfloat16_reason(context: KernelContext) -> str | None:
    if context.weight_dtype == torch.bfloat16:
        return None
    return f"serves bfloat16 weights only, asked for {context.weight_dtype}"


def _native_linear(weight: Weight, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear:
    is_narrow = isinstance(weight, Tensor) and weight.dtype == torch.bfloat16
    return native.pack_linear(weight, bias, "bfloat16" if is_narrow else "float32")


def _serves(context: KernelContext) -> str | None:
    return None


def _on_cpu(context: KernelContext) -> str | None:
    return None if context.device == "cpu" else "computes on the CPU only"


def _cpu_and(reason: Reason) -> Reason:
    return _all(_on_cpu, reason)


def _all(*reasons: Reason) -> Reason:
    """The first of the reasons that holds."""

    def check(context: KernelContext) -> str | None:
        return next((found for reason in reasons if (found := reason(context)) is not None), None)

    return check
