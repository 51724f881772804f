"""Orthogonal matrices that an int8 model's weights are multiplied with as they are loaded, made to be cheap to apply.

A few channels of a model's activations are far larger than the rest, and 8 bits of a row's largest value leave little
for the others. Rotated, every channel is a sum over all, and none stands out; where x and a weight's inputs are rotated
by the same matrix, their product stays. docs/decisions/0007-int8-activations-on-amx.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_SEED = 0x616E7469  # the signs belong to every stored prefix: another seed is another model


@dataclass(frozen=True, eq=False)
class Rotation:
    """`R[i b + k, j b + l] = signs[i b + k] mix[i, j] H[k, l]`: signs `[size]` (None: ones), an orthogonal mix `[a, a]`
    (None: the identity), both float32, and the Walsh-Hadamard matrix of b = `block`, a power of two, over sqrt(b)."""

    size: int
    block: int
    signs: Tensor | None = None
    mix: Tensor | None = None

    def matrix(self) -> Tensor:
        """R in float64, `[size, size]`."""
        num_blocks = self.size // self.block
        mix = torch.eye(num_blocks) if self.mix is None else self.mix
        signs = torch.ones(self.size) if self.signs is None else self.signs
        return signs.double()[:, None] * torch.kron(mix.double(), hadamard_matrix(self.block))


def whole_rotation(size: int) -> Rotation:
    """A rotation that spreads every channel over all of `size`: random signs, always the same, blocks as large as a
    power of two can be, and the cosine transform across them."""
    block = largest_block(size, size)
    num_blocks = size // block
    outputs = torch.arange(num_blocks, dtype=torch.float64)
    mix = torch.cos(math.pi * (2 * outputs[:, None] + 1) * outputs / (2 * num_blocks)) * math.sqrt(2 / num_blocks)
    mix[:, 0] = math.sqrt(1 / num_blocks)
    return Rotation(size, block, random_signs(size), mix.float() if num_blocks > 1 else None)


def block_rotation(size: int, block: int) -> Rotation:
    """Blocks of `block` channels, each by itself, without signs."""
    return Rotation(size, block)


def largest_block(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    block = 1
    while size % (2 * block) == 0 and 2 * block <= most:
        block *= 2
    return block


def random_signs(size: int) -> Tensor:
    """+1 or -1 in float32, from numpy's Philox, whose raw output no version changes."""
    raw = np.random.Philox(key=_SEED).random_raw(size)
    return torch.from_numpy(1.0 - 2.0 * (raw >> np.uint64(63)).astype(np.float32)).float()


def hadamard_matrix(block: int) -> Tensor:
    """The Walsh-Hadamard matrix in natural order over sqrt(block), float64 `[block, block]`."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(block)
