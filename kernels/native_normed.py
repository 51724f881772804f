"""What follows a norm in a layer as one kernel on AMX tiles, norm included (csrc/cpu/amx_normed.h).

A linear layer, and a whole gated MLP, whose gated activation leaves the first product's tiles as bfloat16, ready for
the second: neither the norm's result nor `[tokens, 2 * size]` float32 is ever written. A row's result depends neither
on the rows beside it nor on the threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from antiphon.kernels import native, native_int8
from antiphon.kernels.ops import KernelContext, Norm, Weight

if TYPE_CHECKING:
    from antiphon.kernels import _native

_PANEL_ROWS = 16  # of gate, and of up, beside each other
Packed = Tensor | native_int8.PackedInt8


def reason(context: KernelContext) -> str | None:
    """Why these kernels cannot serve on this machine, or None."""
    return None if native.isa() == "amx" else f"is for AMX tiles; {native.isa()} runs one operation after the other"


def pack_normed_linear(norm: Norm, weight: Weight, bias: Tensor | None) -> NativeNormedLinear:
    """Packs `weight [out, in]` (float32, bfloat16 or float16, on the CPU) as bfloat16, with `bias [out]`.

    Beside weight and packed weight at most 512 rows in float32 are held. TypeError or ValueError for anything else.
    """
    _check(norm, weight, bias)
    packed = native.pack_rows(native.rows_of(weight), tuple(weight.shape), "bfloat16", native.isa())
    return NativeNormedLinear(norm, packed, bias, shape=tuple(weight.shape))


def pack_int8_normed_linear(norm: Norm, weight: Weight, bias: Tensor | None) -> NativeNormedLinear:
    """As `pack_normed_linear`, quantised to int8 with a scale for each row. ValueError also for a weight that is not
    finite."""
    _check(norm, weight, bias)
    packed = native_int8.pack_int8_rows(native.rows_of(weight), tuple(weight.shape), native.isa())
    return NativeNormedLinear(norm, packed, bias, shape=tuple(weight.shape))


def pack_gated_mlp(norm: Norm, gate: Weight, up: Weight, down: Weight, block: int = 1) -> NativeGatedMlp:
    """Packs `gate, up [size, in]` and `down [in, size]` (float32, bfloat16 or float16, on the CPU) as bfloat16.

    Beside weights and packed weights at most 512 rows in float32 are held. TypeError or ValueError for anything else,
    and for a block over 1, which int8 alone has.
    """
    _check_mlp(norm, gate, up, down, block)
    if block != 1:
        raise ValueError(f"block is {block}; with bfloat16 weights it must be 1")
    wide = native.pack_rows(_interleaved(gate, up), _wide_shape(gate), "bfloat16", native.isa())
    narrow = native.pack_rows(native.rows_of(down), tuple(down.shape), "bfloat16", native.isa())
    return NativeGatedMlp(norm, wide, narrow, size=gate.shape[0])


def pack_int8_gated_mlp(norm: Norm, gate: Weight, up: Weight, down: Weight, block: int = 1) -> NativeGatedMlp:
    """As `pack_gated_mlp`, quantised to int8 with a scale for each row. ValueError also for a weight that is not
    finite."""
    _check_mlp(norm, gate, up, down, block)
    wide = native_int8.pack_int8_rows(_interleaved(gate, up), _wide_shape(gate), native.isa())
    narrow = native_int8.pack_int8_rows(native.rows_of(down), tuple(down.shape), native.isa())
    return NativeGatedMlp(norm, wide, narrow, size=gate.shape[0], block=block)


class NativeNormedLinear:
    """`norm(x) @ weight.T (+ bias)` on a weight packed by `pack_normed_linear`. Immutable."""

    def __init__(self, norm: Norm, packed: Packed, bias: Tensor | None, *, shape: tuple[int, ...]) -> None:
        self.out_features, self.in_features = shape
        kept_norm = native.float32_copy(norm.weight)
        kept_bias = None if bias is None else native.float32_copy(bias)
        self._kept = (packed, kept_bias, kept_norm)  # keeps the memory alive that the kernel's addresses point to
        self._kernel: _native.NormedLinear = native.extension().NormedLinear(
            *_addresses(packed),
            0 if kept_bias is None else kept_bias.data_ptr(),
            kept_norm.data_ptr(),
            norm.eps,
            *shape,
            native.isa(),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight, its scales, the bias and the norm's weight."""
        return sum(_num_bytes(kept) for kept in self._kept if kept is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """`x [tokens, in]` to a new `[tokens, out]`, float32 on the CPU, contiguous.

        TypeError or ValueError, before any work, for another dtype, device or shape. Runs without the interpreter's
        lock, on the pool's threads.
        """
        _check_x(x, self.in_features)
        out = torch.empty(x.shape[0], self.out_features)
        self._kernel.run(x.data_ptr(), x.shape[0], out.data_ptr())
        return out


class NativeGatedMlp:
    """`x + h(silu(n @ gate.T) * (n @ up.T)) @ down.T`, n being `norm(x)`, on weights packed by `pack_gated_mlp`; see
    `ops.PackGatedMlp`. Immutable."""

    def __init__(self, norm: Norm, gate_up: Packed, down: Packed, *, size: int, block: int = 1) -> None:
        self.in_features, self.size = norm.weight.shape[0], size
        kept_norm = native.float32_copy(norm.weight)
        self._kept = (gate_up, down, kept_norm)  # keeps the memory alive that the kernel's addresses point to
        self._kernel: _native.GatedMlp = native.extension().GatedMlp(
            *_addresses(gate_up),
            *_addresses(down),
            kept_norm.data_ptr(),
            norm.eps,
            self.in_features,
            size,
            block,
            native.isa(),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, their scales and the norm's weight."""
        return sum(map(_num_bytes, self._kept))

    def __call__(self, x: Tensor) -> Tensor:
        """`x [tokens, in]` to a new tensor of that shape, float32 on the CPU, contiguous.

        TypeError or ValueError, before any work, for another dtype, device or shape. Runs without the interpreter's
        lock, on the pool's threads.
        """
        _check_x(x, self.in_features)
        out = torch.empty_like(x)
        self._kernel.run(x.data_ptr(), x.shape[0], out.data_ptr())
        return out


def _check_x(x: Tensor, features: int) -> None:
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise TypeError(f"x is {x.dtype} on {x.device}; this kernel takes float32 on the CPU")
    if x.dim() != 2 or x.shape[1] != features or not x.is_contiguous():
        raise ValueError(f"x is {tuple(x.shape)} with strides {x.stride()}; need contiguous [tokens, {features}]")


def _check(norm: Norm, weight: Weight, bias: Tensor | None) -> None:
    native.check_weight(weight, bias)
    if norm.weight.shape != weight.shape[1:]:
        raise ValueError(f"the norm's weight is {tuple(norm.weight.shape)}; weight is {tuple(weight.shape)}")
    most = native.extension().MAX_INT8_LINEAR_K
    if weight.shape[1] > most:
        raise ValueError(f"weight is {tuple(weight.shape)}; this kernel takes at most {most} inputs")


def _check_mlp(norm: Norm, gate: Weight, up: Weight, down: Weight, block: int) -> None:
    _check(norm, gate, None)
    native.check_weight(up, None)
    native.check_weight(down, None)
    if gate.shape != up.shape or down.shape != gate.shape[::-1]:
        raise ValueError(f"gate {tuple(gate.shape)}, up {tuple(up.shape)} and down {tuple(down.shape)} do not fit")
    most = native.extension().MAX_INT8_LINEAR_K
    if gate.shape[0] > most:
        raise ValueError(f"gate is {tuple(gate.shape)}; down takes at most {most} inputs")
    native.check_block(block, gate.shape[0])


def _wide_shape(gate: Weight) -> tuple[int, int]:
    """Of gate and up together, the last panel whole."""
    return -(-gate.shape[0] // _PANEL_ROWS) * 2 * _PANEL_ROWS, gate.shape[1]


def _num_bytes(packed: Packed) -> int:
    return packed.nbytes if isinstance(packed, Tensor) else packed.panels.nbytes + packed.scales.nbytes


def _addresses(packed: Packed) -> tuple[int, int, int]:
    """Address of the weight and of its scales (0: bfloat16), and the largest absolute sum of a row."""
    if isinstance(packed, Tensor):
        return packed.data_ptr(), 0, 0
    return packed.panels.data_ptr(), packed.scales.data_ptr(), packed.max_absolute_sum


def _interleaved(gate: Weight, up: Weight) -> native.Rows:
    """Rows of the two in panels, 16 of gate and the same 16 of up; what the last panel lacks is zeros."""

    def panels_of(weight: Weight, first: int, end: int) -> Tensor:
        rows = torch.zeros(end - first, weight.shape[1])
        num_rows = min(end, weight.shape[0]) - first
        rows[:num_rows] = native.rows_of(weight)(first, first + num_rows)
        return rows.view(-1, _PANEL_ROWS, weight.shape[1])

    def rows(first: int, end: int) -> Tensor:
        panels = [panels_of(weight, first // 2, end // 2) for weight in (gate, up)]
        return torch.stack(panels, dim=1).reshape(end - first, gate.shape[1])

    return rows
