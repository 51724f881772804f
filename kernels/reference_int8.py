"""The int8 linear layer in plain torch: the oracle of csrc/cpu/int8_linear.h, and what `choose_kernels` falls back on.

Its products are exact, as the native kernel's are (integers, summed in float64, which holds them all), so both give the
same bits on forms with the same levels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.kernels.native import Rows, rows_of
from antiphon.kernels.ops import ONE_PLANE, PackedLinear, Planes, Weight, stored

MAX_WEIGHT = 127
WIDE_LEVELS = 32767  # of an activation kept in int16
SMALLEST_ABSMAX = 2.0**-100
_STRIP_ROWS = 256  # rows of a weight that are widened at a time


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight [n, K]` as int8 `[n, K]` and fp32 scales `[n]`: `scale = absmax / 127`, `int8 = rint(weight / scale)`;
    a row of zeros (all below 2^-100) has scale 0.

    Cutting the largest values off for a finer scale does not pay: cutting one value by a share d costs (d absmax)² and
    saves about 2 d K absmax² / (12 · 127²), so that the best d is K / 193548, 0.5 % at K = 896, for 0.5 % less error.
    """
    wide = weight.to(torch.float32)
    absmax = wide.abs().amax(1)
    if not bool(torch.isfinite(absmax).all()):
        raise ValueError("the weight has values that are not finite; int8 cannot hold them")
    used = absmax >= SMALLEST_ABSMAX
    scale = torch.where(used, absmax / MAX_WEIGHT, 0.0)
    divisor = torch.where(used, scale, float("inf"))
    return wide.div(divisor[:, None]).round_().to(torch.int8, memory_format=torch.contiguous_format), scale


def activation_levels(max_absolute_sum: int, max_levels: int = WIDE_LEVELS) -> int:
    """The most levels with which no int32 sum overflows, where no row of int8 weights has a larger absolute sum."""
    return min(max_levels, (2**31 - 1) // max(1, max_absolute_sum))


def quantize_activations(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """`x [rows, K]` fp32 as whole numbers in float64 `[rows, K]` and fp32 scales `[rows]`: `scale = absmax / levels`,
    `rint(x * (levels / absmax))`. A row of zeros has scale 0, a row with a value that is not finite has scale NaN."""
    absmax = x.abs().amax(1)
    finite = torch.isfinite(absmax)
    used = finite & (absmax >= SMALLEST_ABSMAX)
    count = torch.tensor(float(levels), device=x.device)
    scale = torch.where(used, absmax / count, torch.where(finite, 0.0, float("nan")))
    inverse = torch.where(used, count / absmax, 0.0)
    quantized = torch.where(used[:, None], (x * inverse[:, None]).round_(), 0.0)
    return quantized.double(), scale


@dataclass(frozen=True)
class Int8PlainLinear:
    """A quantised weight `[out, in]` row-major with its scales `[out]` and the activations' levels; `fine` has what
    that leaves of the weight, `fine_x` stands for a second plane of x where levels are few: csrc/cpu/int8_planes.h."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    levels: int
    fine: Int8PlainLinear | None = None
    fine_x: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes held, scales and bias included."""
        own = self.weight.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)
        return own + (0 if self.fine is None else self.fine.num_bytes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x [..., in]` to `[..., out]`, `x @ weight.T + bias (+ residual)`, in x's dtype."""
        if self.fine is not None:
            residual = self.fine(x, residual)
        rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
        quantized, x_scale = quantize_activations(rows, self.levels)
        if self.fine_x and self.levels <= MAX_WEIGHT:
            left = torch.where(quantized.any(1, keepdim=True), rows - quantized.float() * x_scale[:, None], 0.0)
            residual = replace(self, bias=None, fine=None, fine_x=False)(left.view(x.shape), residual)
        out = torch.empty(rows.shape[0], self.weight.shape[0], device=x.device)
        for first in range(0, self.weight.shape[0], _STRIP_ROWS):
            strip = slice(first, first + _STRIP_ROWS)
            sums = quantized @ self.weight[strip].double().T
            out[:, strip] = sums.to(torch.float32) * (x_scale[:, None] * self.scale[strip])
        if self.bias is not None:
            out += self.bias
        out = out.view(*x.shape[:-1], -1)
        return (out if residual is None else out.add_(residual)).to(x.dtype)


def linear(weight: Weight, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear:
    """See `ops.PackLinear`. Quantises in strips, so that no whole fp32 copy is held."""
    rows = rows_of(weight)
    fine = _plane(weight, lambda first, end: _remainder(rows(first, end)), None) if planes.weight else None
    return replace(_plane(weight, rows, bias), fine=fine, fine_x=planes.activations)


def _remainder(rows: Tensor) -> Tensor:
    quantized, scale = quantize_rows(rows)
    return rows - quantized * scale[:, None]


def _plane(weight: Weight, rows: Rows, bias: Tensor | None) -> Int8PlainLinear:
    device = stored(weight).device
    quantized = torch.empty(weight.shape, dtype=torch.int8, device=device)
    scale = torch.empty(weight.shape[0], device=device)
    max_absolute_sum = 0
    for first in range(0, weight.shape[0], _STRIP_ROWS):
        strip = slice(first, first + _STRIP_ROWS)
        quantized[strip], scale[strip] = quantize_rows(rows(first, min(first + _STRIP_ROWS, weight.shape[0])))
        sums = quantized[strip].abs().sum(1, dtype=torch.int64)
        max_absolute_sum = max(max_absolute_sum, int(sums.max()))
    kept_bias = None if bias is None else bias.to(torch.float32)
    return Int8PlainLinear(quantized, scale, kept_bias, activation_levels(max_absolute_sum))
