"""What a model's weights are rewritten by as they are loaded, so that 8 bits hold its activations: folded rotations.

With R a rotation of the residual stream (kernels/rotation.py), x R instead of x goes from layer to layer:

    embedding          rows times R
    behind a norm      norm(x) g W^T = norm(x R) (W g R)^T, as R leaves a row's mean square alone: the gain g goes
                       into the weight, the norm keeps ones; the head likewise
    added to x         R^T W for o and down

Inside a layer, each head of v is rotated by a Hadamard matrix in the rows of v's weight and bias, and back in o's
columns (all query heads of a group read the same v); the MLP's gated activation is rotated as it is computed, in
blocks, and back in down's columns. q and k, their biases and norms stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.engine.config import ModelConfig
from antiphon.kernels.ops import KernelSet, RotatedWeight, Weight
from antiphon.kernels.rotation import Rotation, block_rotation, largest_block, whole_rotation

_MLP_BLOCK = 256  # of the gated activation, where a power of two so large divides it
_STRIP_ROWS = 512  # of the embedding in float32 at a time


class Folding:
    """Nothing is folded: weights come as they are."""

    name = ""  # of what is folded in, where a prefix is kept under what determines its bits
    mlp_block = 1  # see `ops.SiluAndMul`

    def gain(self, gain: Tensor) -> Tensor:
        """What is left of a norm's weight."""
        return gain

    def behind_norm(self, weight: Tensor, gain: Tensor) -> Weight:
        """A weight `[out, hidden]` whose input comes from a norm with this weight."""
        return weight

    def values(self, weight: Tensor) -> Tensor:
        """v's weight `[kv_heads * head_dim, hidden]` or its bias."""
        return weight

    def attention_out(self, weight: Tensor) -> Tensor:
        """o's weight `[hidden, heads * head_dim]`."""
        return weight

    def mlp_down(self, weight: Tensor) -> Tensor:
        """down's weight `[hidden, size]`."""
        return weight

    def added(self, bias: Tensor) -> Tensor:
        """A bias `[hidden]` of what is added to the residual stream."""
        return bias

    def embedding(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """The embedding `[vocab, hidden]` in `dtype`."""
        return table.to(dtype)


@dataclass(frozen=True)
class RotatedFolding(Folding):
    """Rotations folded in; weights leave in float32."""

    kernels: KernelSet
    residual: Rotation
    heads: Rotation  # of one head's v
    mlp_block: int
    name = "rotated"

    @staticmethod
    def of(config: ModelConfig, kernels: KernelSet) -> RotatedFolding:
        """The rotations of a model's sizes: the same ones for every model of these sizes."""
        heads = block_rotation(config.head_dim, largest_block(config.head_dim, config.head_dim))
        block = largest_block(config.intermediate_size, _MLP_BLOCK)
        return RotatedFolding(kernels, whole_rotation(config.hidden_size), heads, block)

    def gain(self, gain: Tensor) -> Tensor:
        return torch.ones_like(gain)

    def behind_norm(self, weight: Tensor, gain: Tensor) -> Weight:
        return RotatedWeight(weight, gain, self.residual, self.kernels.rotate_channels)

    def values(self, weight: Tensor) -> Tensor:
        # A row for each head: its channels lie beside each other, or `hidden` apart.
        heads = weight.view(-1, self.heads.size, weight[0].numel()).transpose(1, 2)
        rotated = self._by_rows(_wide(heads).view(-1, self.heads.size), self.heads)
        return rotated.view(heads.shape).transpose(1, 2).reshape(weight.shape)

    def attention_out(self, weight: Tensor) -> Tensor:
        heads = _wide(weight).view(-1, self.heads.size)
        return self._outputs(self._by_rows(heads, self.heads).view(weight.shape))

    def mlp_down(self, weight: Tensor) -> Tensor:
        blocks = block_rotation(weight.shape[1], self.mlp_block)
        return self._outputs(self._by_rows(_wide(weight), blocks))

    def added(self, bias: Tensor) -> Tensor:
        return self._by_rows(_wide(bias[None]), self.residual)[0]

    def embedding(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        rotated = torch.empty(table.shape, dtype=dtype)
        for first in range(0, table.shape[0], _STRIP_ROWS):
            strip = slice(first, first + _STRIP_ROWS)
            rotated[strip] = self._by_rows(_wide(table[strip]), self.residual)
        return rotated

    def _outputs(self, weight: Tensor) -> Tensor:
        return self.kernels.rotate_channels(weight, self.residual, columns=True)

    def _by_rows(self, weight: Tensor, rotation: Rotation) -> Tensor:
        return self.kernels.rotate_channels(weight, rotation)


def _wide(weight: Tensor) -> Tensor:
    """A float32 copy, contiguous, to be rotated in place."""
    return torch.empty(weight.shape).copy_(weight)
