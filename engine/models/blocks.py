"""A norm and what follows it: fused where there is a kernel for it, else one operation after the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from antiphon.kernels.ops import KernelSet, Norm, PackedBlock, PackedLinear, Weight, stacked


def pack_normed_linear(kernels: KernelSet, norm: Norm, weight: Weight, bias: Tensor | None) -> PackedBlock:
    """`norm(x) @ weight.T + bias`."""
    if kernels.normed_linear is not None:
        return kernels.normed_linear(norm, weight, bias)
    return ComposedLinear(kernels, norm, kernels.linear(weight, bias))


def pack_gated_mlp(
    kernels: KernelSet, norm: Norm, gate: Weight, up: Weight, down: Weight, block: int = 1
) -> PackedBlock:
    """`x + h(silu(n @ gate.T) * (n @ up.T)) @ down.T` with n = `norm(x)` and h as in `ops.PackGatedMlp`."""
    if kernels.gated_mlp is not None:
        return kernels.gated_mlp(norm, gate, up, down, block)
    return ComposedMlp(kernels, norm, kernels.linear(stacked(gate, up), None), kernels.linear(down, None), block)


@dataclass(frozen=True)
class ComposedLinear:
    """A norm, then a product."""

    kernels: KernelSet
    norm: Norm
    linear: PackedLinear

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self.linear.num_bytes + self.norm.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """`x [tokens, in]` → `[tokens, out]`."""
        return self.linear(self.kernels.rms_norm(x, self.norm.weight, self.norm.eps))


@dataclass(frozen=True)
class ComposedMlp:
    """A norm, gate and up in one product, their gated activation, and down."""

    kernels: KernelSet
    norm: Norm
    gate_up: PackedLinear
    down: PackedLinear
    block: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.num_bytes + self.down.num_bytes + self.norm.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """`x [tokens, in]` → x plus its MLP, `[tokens, in]`."""
        normed = self.kernels.rms_norm(x, self.norm.weight, self.norm.eps)
        return self.down(self.kernels.silu_and_mul(self.gate_up(normed), self.block), x)
