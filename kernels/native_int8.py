"""The packed int8 linear layer in C++ (csrc/cpu/int8_linear.h): half of bfloat16's bytes, and exact sums.

Weights are int8 with one scale per output; activations are quantised per row as they are packed, on the AVX2 and
portable forms to int16 with as many levels as the exact int32 sum allows (some 8,000 and more on the usual weights), so
that the weights' 8 bits are all that is lost. A row's result depends neither on the rows beside it nor on the threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from antiphon.kernels import native
from antiphon.kernels.ops import ONE_PLANE, Planes, Weight

if TYPE_CHECKING:
    from antiphon.kernels import _native


def pack_int8_linear(weight: Weight, bias: Tensor | None = None, planes: Planes = ONE_PLANE) -> NativeInt8Linear:
    """Quantises and packs `weight [N, K]` (float32, bfloat16 or float16, on the CPU) and `bias [N]`, with second
    `planes` where they are asked for.

    Beside weight and packed weight at most 512 rows in float32 are held. TypeError or ValueError for anything else, for
    K over 65,536 and for a weight with values that are not finite; RuntimeError when the extension is not there.
    """
    reason = native.available()
    if reason is not None:
        raise RuntimeError(reason)
    _check_weight(weight, bias)
    rows, shape, isa = native.rows_of(weight), tuple(weight.shape), native.isa()
    packed = pack_int8_rows(rows, shape, isa)
    fine = pack_int8_rows(_remainder_of(rows), shape, isa) if planes.weight else None
    kept_bias = None if bias is None else native.float32_copy(bias)
    return NativeInt8Linear(packed, kept_bias, fine=fine, fine_x=planes.activations, num_k=weight.shape[1], isa=isa)


@dataclass(frozen=True)
class PackedInt8:
    """A quantised weight in the layout of an instruction set; `max_absolute_sum` is the largest of a row."""

    panels: Tensor
    scales: Tensor
    max_absolute_sum: int


def pack_int8_rows(rows_of: native.Rows, shape: tuple[int, ...], isa: str) -> PackedInt8:
    """Quantises and packs a weight of `shape [N, K]` from float32 rows some at a time. ValueError where one is not
    finite."""
    num_columns, num_k = shape
    extension = native.extension()
    panels = torch.empty(extension.int8_panels_bytes(num_columns, num_k, isa), dtype=torch.int8)
    extension.advise_huge_pages(panels.data_ptr(), panels.nbytes)
    scales = torch.empty(num_columns)
    max_absolute_sum = 0
    for first in range(0, num_columns, native.PACK_ROWS):
        rows = rows_of(first, min(num_columns, first + native.PACK_ROWS))
        found = extension.pack_int8_rows(
            rows.data_ptr(), first, rows.shape[0], num_k, panels.data_ptr(), scales.data_ptr(), isa
        )
        if found < 0:
            raise ValueError("the weight has values that are not finite; int8 cannot hold them")
        max_absolute_sum = max(max_absolute_sum, found)
    return PackedInt8(panels, scales, max_absolute_sum)


def _remainder_of(rows: native.Rows) -> native.Rows:
    """What quantising rows leaves of them."""

    def remainder(first: int, end: int) -> Tensor:
        left = rows(first, end).clone()
        native.extension().int8_remainder(left.data_ptr(), *left.shape)
        return left

    return remainder


class NativeInt8Linear:
    """`y = x @ weight^T (+ bias) (+ residual)` on a weight packed by `pack_int8_linear`; x and y float32. Immutable.
    Products with second planes (csrc/cpu/int8_planes.h) are made first, and added as a residual is.

    `levels` is how many steps an activation has on either side of zero.
    """

    def __init__(
        self,
        weight: PackedInt8,
        bias: Tensor | None,
        *,
        fine: PackedInt8 | None = None,
        fine_x: bool = False,
        num_k: int,
        isa: str,
    ) -> None:
        self.in_features = num_k
        self.out_features = weight.scales.shape[0]
        self.isa = isa
        planes = [weight] if fine is None else [weight, fine]
        addresses = [(plane.panels.data_ptr(), plane.scales.data_ptr(), plane.max_absolute_sum) for plane in planes]
        tensors = [tensor for plane in planes for tensor in (plane.panels, plane.scales)]
        self._kept = (*tensors, bias)  # keeps the memory alive that the kernel's addresses point to
        panels, scales, max_absolute_sum = addresses[0]
        self._kernel: _native.Int8Linear = native.extension().Int8Linear(
            panels,
            scales,
            0 if bias is None else bias.data_ptr(),
            self.out_features,
            num_k,
            max_absolute_sum,
            *(addresses[1] if fine is not None else (0, 0, 0)),
            fine_x,
            isa,
        )
        self.levels = self._kernel.levels

    @property
    def kernel(self) -> _native.Int8Linear:
        """The C++ layer, for kernels that run it a part of its columns at a time (`native_layer.log_prob`)."""
        return self._kernel

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight, the scales and the bias."""
        return sum(kept.nbytes for kept in self._kept if kept is not None)

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`x [..., in_features]` to `[..., out_features]`; `residual`, of that shape, is added last.

        All float32 on the CPU; `out` is contiguous and may be the residual. A row of x with a value that is not finite
        gives a row of NaN. TypeError or ValueError, before any work, for another dtype, device or shape. Runs without
        the interpreter's lock, on the pool's threads.
        """
        _check_operand("x", x, (*x.shape[:-1], self.in_features))
        x = x.contiguous()
        shape = (*x.shape[:-1], self.out_features)
        if residual is not None:
            _check_operand("residual", residual, shape)
            residual = residual.contiguous()
        if out is None:
            out = torch.empty(shape, dtype=torch.float32)
        else:
            _check_operand("out", out, shape)
            if not out.is_contiguous():
                raise ValueError(f"out has strides {out.stride()}; it must be contiguous")
            if native.overlap(out, x) or (residual is not None and _partly(out, residual)):
                raise ValueError("out shares memory with x, or with a part of residual, which are still to be read")
        num_rows = out.numel() // self.out_features
        self._kernel.run(x.data_ptr(), num_rows, 0 if residual is None else residual.data_ptr(), out.data_ptr())
        return out


def _partly(out: Tensor, residual: Tensor) -> bool:
    return out.data_ptr() != residual.data_ptr() and native.overlap(out, residual)


def _check_operand(name: str, operand: Tensor, shape: tuple[int, ...]) -> None:
    if operand.dtype != torch.float32 or operand.device.type != "cpu":
        raise TypeError(f"{name} is {operand.dtype} on {operand.device}; this layer takes float32 on the CPU")
    if operand.dim() < 1 or tuple(operand.shape) != shape:
        raise ValueError(f"{name} is {tuple(operand.shape)}; it must be {shape}")


def _check_weight(weight: Weight, bias: Tensor | None) -> None:
    native.check_weight(weight, bias)
    most = native.extension().MAX_INT8_LINEAR_K
    if weight.shape[1] > most:
        raise ValueError(f"weight is {tuple(weight.shape)}; int8 takes at most {most} inputs")
