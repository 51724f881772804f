"""What the kernels behind a norm must give, in float64, and how far rounding may take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from antiphon.kernels import native_normed
from antiphon.kernels.native_normed import NativeGatedMlp, NativeNormedLinear
from antiphon.kernels.ops import Norm

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative
HALF_BF16 = 2.0**-8  # of bfloat16: 8 significant bits
GATED = 2e-4  # of the gated activation before it is rounded (csrc/cpu/amx_normed.h)
SILU_SLOPE = 1.1  # the steepest of silu
INT8_LEVELS = 127
CHUNK = 256  # rows between an MLP's two products
FAINT = 2.0**-48  # the norm of x times this is that of x, and its square is still a normal number


@dataclass(frozen=True)
class Operands:
    """`weights` is gate, up and down of an MLP, or the weight alone of a linear layer, which also has a bias."""

    norm: Norm
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    x: Tensor

    def changed(self, *weights: Tensor) -> Operands:
        return replace(self, weights=weights)


def normal_operands(rows: int, num_k: int, *shapes: tuple[int, int], bias: bool, seed: int) -> Operands:
    """Sums of about 2, whatever the size of a row of x."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = normal(rows, num_k) * (1 + torch.arange(rows) % 9)[:, None]
    weights = tuple(normal(*shape) * shape[1] ** -0.5 for shape in shapes)
    return Operands(Norm(2 + 0.5 * normal(num_k), 1e-6), weights, normal(shapes[0][0]) if bias else None, x)


@dataclass(frozen=True)
class Rounded:
    """What a product is computed with: its operands' values and by how much each may be off, in float64."""

    values: Tensor
    off: Tensor

    def __matmul__(self, weight: Rounded) -> Rounded:
        """The product with `weight.T`, and by how much the computed one may be off, at worst: by what its operands are,
        and by one rounding for each step of the longest chain of float32 sums (an int8 sum has three)."""
        size, weight_size = self.values.abs() + self.off, weight.values.abs() + weight.off
        off = size @ weight_size.T - self.values.abs() @ weight.values.abs().T
        chain = 16 + 2 + -(-self.values.shape[1] // 32) + 1
        return Rounded(self.values @ weight.values.T, off + 1.01 * chain * EPSILON * (size @ weight_size.T))

    def plus(self, other: Tensor) -> Rounded:
        values = self.values + other.double()
        return Rounded(values, self.off + EPSILON * (values.abs() + self.off) + 1e-30)


def normed(x: Tensor, norm: Norm) -> Rounded:
    """The squares are summed in chains, which the root halves; six roundings follow."""
    exact = x.double()
    values = exact * (exact.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    chain = -(-x.shape[1] // 64) + 6
    return Rounded(values, 1.01 * (chain / 2 + 6) * EPSILON * values.abs())


def exactly(values: Tensor) -> Rounded:
    return Rounded(values.double(), torch.zeros_like(values, dtype=torch.float64))


def as_bf16(of: Rounded) -> Rounded:
    """What the kernel has is known, but for values about halfway between two."""
    values, low, high = (v.bfloat16().double() for v in (of.values, of.values - of.off, of.values + of.off))
    return Rounded(values, torch.maximum((values - low).abs(), (high - values).abs()))


def as_int8(of: Rounded) -> Rounded:
    """Half a step of each row, of which the largest is 127."""
    step = (of.values.abs() + of.off).amax(1, keepdim=True) / INT8_LEVELS
    return Rounded(of.values, of.off + 1.001 * step / 2)


@dataclass(frozen=True)
class Form:
    """A kernel, by what it computes and what it keeps its weights in. An MLP's `size` is that of h, a linear layer's
    that of y."""

    pack: Callable[..., NativeNormedLinear | NativeGatedMlp]
    is_mlp: bool
    is_int8: bool

    def operands(self, rows: int, num_k: int, size: int, seed: int = 0) -> Operands:
        shapes = [(size, num_k), (size, num_k), (num_k, size)] if self.is_mlp else [(size, num_k)]
        return normal_operands(rows, num_k, *shapes, bias=not self.is_mlp, seed=seed)

    def packed(self, o: Operands) -> NativeNormedLinear | NativeGatedMlp:
        return self.pack(o.norm, *o.weights) if self.is_mlp else self.pack(o.norm, *o.weights, o.bias)

    def run(self, o: Operands) -> Tensor:
        """After rows of NaN, more than these, have gone through the workspaces."""
        kernel = self.packed(o)
        return run(kernel, o.x)

    def result(
        self, o: Operands, of_x: Callable[[Rounded], Rounded], of_weight: Callable[[Rounded], Rounded]
    ) -> Rounded:
        """In float64, after each factor of a product has been through `of_x` or `of_weight`."""
        n, weights = of_x(normed(o.x, o.norm)), [of_weight(exactly(weight)) for weight in o.weights]
        if not self.is_mlp:
            assert o.bias is not None
            return (n @ weights[0]).plus(o.bias)
        gate, up = n @ weights[0], n @ weights[1]
        silu = torch.nn.functional.silu(gate.values)
        off = SILU_SLOPE * gate.off * (up.values.abs() + up.off) + silu.abs() * up.off
        h = silu * up.values
        h_of = Rounded(h, off + (h.abs() + off) * (GATED + HALF_BF16) + 1e-30)
        return ((as_int8(h_of) if self.is_int8 else h_of) @ weights[2]).plus(o.x)

    def exact(self, o: Operands) -> Tensor:
        return self.result(o, lambda n: n, lambda weight: weight).values

    def error_and_bound(self, y: Tensor, o: Operands) -> tuple[Tensor, Tensor]:
        """|y - exact| and a bound that holds for any values. bfloat16: against the rounded norm and weights."""
        narrow = as_int8 if self.is_int8 else as_bf16
        found = self.result(o, narrow, narrow)
        return (y.double() - found.values).abs(), found.off


LINEAR = Form(native_normed.pack_normed_linear, is_mlp=False, is_int8=False)
INT8_LINEAR = Form(native_normed.pack_int8_normed_linear, is_mlp=False, is_int8=True)
MLP = Form(native_normed.pack_gated_mlp, is_mlp=True, is_int8=False)
INT8_MLP = Form(native_normed.pack_int8_gated_mlp, is_mlp=True, is_int8=True)
FORMS = pytest.mark.parametrize(
    "form", [LINEAR, INT8_LINEAR, MLP, INT8_MLP], ids=["linear", "int8_linear", "mlp", "int8_mlp"]
)
MLPS = pytest.mark.parametrize("form", [MLP, INT8_MLP], ids=["mlp", "int8_mlp"])


def run(kernel: NativeNormedLinear | NativeGatedMlp, x: Tensor) -> Tensor:
    kernel(torch.full((x.shape[0] + 20, kernel.in_features), float("nan")))
    return kernel(x)
