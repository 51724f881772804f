"""A gated MLP as one kernel on AMX tiles (csrc/cpu/amx_mlp.h): the gated activation leaves the first product's tiles as
bfloat16, ready for the second, so that `[tokens, 2 * size]` float32 is never written.

A row's result depends neither on the rows beside it nor on the threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from antiphon.kernels import native, native_int8
from antiphon.kernels.ops import KernelContext

if TYPE_CHECKING:
    from antiphon.kernels import _native

_PANEL_ROWS = 16  # of gate, and of up, beside each other


def reason(context: KernelContext) -> str | None:
    """Why this kernel cannot serve on this machine, or None."""
    return None if native.isa() == "amx" else f"is for AMX tiles; {native.isa()} runs linear and silu_and_mul"


def pack_gated_mlp(gate: Tensor, up: Tensor, down: Tensor) -> NativeGatedMlp:
    """Packs `gate, up [size, in]` and `down [out, size]` (float32, bfloat16 or float16, on the CPU) as bfloat16.

    Beside weights and packed weights at most 512 rows in float32 are held. TypeError or ValueError for anything else.
    """
    _check_weights(gate, up, down)
    wide = native.pack_rows(_interleaved(gate, up), _wide_shape(gate), "bfloat16", native.isa())
    narrow = native.pack_rows(native.rows_of(down), tuple(down.shape), "bfloat16", native.isa())
    return NativeGatedMlp(wide, narrow, num_k=gate.shape[1], size=gate.shape[0], num_outputs=down.shape[0])


def pack_int8_gated_mlp(gate: Tensor, up: Tensor, down: Tensor) -> NativeGatedMlp:
    """As `pack_gated_mlp`, quantised to int8 with a scale for each row. ValueError also where a value is not finite."""
    _check_weights(gate, up, down)
    wide = native_int8.pack_int8_rows(_interleaved(gate, up), _wide_shape(gate), native.isa())
    narrow = native_int8.pack_int8_rows(native.rows_of(down), tuple(down.shape), native.isa())
    return NativeGatedMlp(wide, narrow, num_k=gate.shape[1], size=gate.shape[0], num_outputs=down.shape[0])


class NativeGatedMlp:
    """`(silu(x @ gate.T) * (x @ up.T)) @ down.T + residual` on weights packed by `pack_gated_mlp`. Immutable."""

    def __init__(
        self,
        gate_up: Tensor | native_int8.PackedInt8,
        down: Tensor | native_int8.PackedInt8,
        *,
        num_k: int,
        size: int,
        num_outputs: int,
    ) -> None:
        self.in_features, self.size, self.out_features = num_k, size, num_outputs
        self._kept = (gate_up, down)  # keeps the memory alive that the kernel's addresses point to
        self._kernel: _native.GatedMlp = native.extension().GatedMlp(
            *_addresses(gate_up), *_addresses(down), num_k, size, num_outputs, native.isa()
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights and scales."""
        return sum(
            kept.nbytes if isinstance(kept, Tensor) else kept.panels.nbytes + kept.scales.nbytes for kept in self._kept
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`x [tokens, in]` and `residual [tokens, out]` to a new `[tokens, out]`, all float32 on the CPU, contiguous.

        TypeError or ValueError, before any work, for another dtype, device or shape. Runs without the interpreter's
        lock, on the pool's threads.
        """
        num_rows = x.shape[0] if x.dim() else 0
        for name, operand, features in (("x", x, self.in_features), ("residual", residual, self.out_features)):
            if operand.dtype != torch.float32 or operand.device.type != "cpu":
                raise TypeError(f"{name} is {operand.dtype} on {operand.device}; this kernel takes float32 on the CPU")
            if operand.shape != (num_rows, features) or not operand.is_contiguous():
                raise ValueError(
                    f"{name} is {tuple(operand.shape)} with strides {operand.stride()}; "
                    f"need contiguous ({num_rows}, {features})"
                )
        out = torch.empty_like(residual)
        self._kernel.run(x.data_ptr(), num_rows, residual.data_ptr(), out.data_ptr())
        return out


def _check_weights(gate: Tensor, up: Tensor, down: Tensor) -> None:
    for weight in (gate, up, down):
        native.check_weight(weight, None)
    if gate.shape != up.shape or down.shape[1] != gate.shape[0]:
        raise ValueError(f"gate {tuple(gate.shape)}, up {tuple(up.shape)} and down {tuple(down.shape)} do not fit")
    if max(gate.shape) > native.extension().MAX_INT8_LINEAR_K:
        raise ValueError(f"gate is {tuple(gate.shape)}; this kernel takes at most 65,536 inputs of either product")


def _wide_shape(gate: Tensor) -> tuple[int, int]:
    """Of gate and up together, the last panel whole."""
    return -(-gate.shape[0] // _PANEL_ROWS) * 2 * _PANEL_ROWS, gate.shape[1]


def _addresses(packed: Tensor | native_int8.PackedInt8) -> tuple[int, int, int]:
    """Address of the weight and of its scales (0: bfloat16), and the largest absolute sum of a row."""
    if isinstance(packed, Tensor):
        return packed.data_ptr(), 0, 0
    return packed.panels.data_ptr(), packed.scales.data_ptr(), packed.max_absolute_sum


def _interleaved(gate: Tensor, up: Tensor) -> native.Rows:
    """Rows of the two in panels, 16 of gate and the same 16 of up; what the last panel lacks is zeros."""

    def panels_of(weight: Tensor, first: int, end: int) -> Tensor:
        rows = torch.zeros(end - first, weight.shape[1])
        there = weight.detach()[first:end]
        rows[: there.shape[0]] = there
        return rows.view(-1, _PANEL_ROWS, weight.shape[1])

    def rows(first: int, end: int) -> Tensor:
        panels = [panels_of(weight, first // 2, end // 2) for weight in (gate, up)]
        return torch.stack(panels, dim=1).reshape(end - first, gate.shape[1])

    return rows
