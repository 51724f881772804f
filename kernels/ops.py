"""Every operation of a model step, named once. `registry.py` finds who computes it; `reference.py` is the oracle.

Keys and values lie per layer as `[num_kv_heads, num_pages * page_tokens, head_dim]` (`LayerCache`): a *slot* is one
token's place in that second axis, and pages that follow each other are one view without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from antiphon.kernels.attention_plan import AttentionPlan as AttentionPlan
from antiphon.kernels.rotation import Rotation

OPERATIONS = (
    "embedding",
    "linear",
    "rms_norm",
    "rotary_and_store",
    "paged_attention",
    "silu_and_mul",
    "rotate_channels",
    "normed_linear",
    "gated_mlp",
    "copy_pages",
    "log_prob",
    "peak",
)


@dataclass(frozen=True)
class KernelContext:
    """What a candidate may look at to say whether it can serve: `dtype` of the activations, `weight_dtype` of the
    matrices (float32, bfloat16, int8) and `kv_dtype` of the stored keys and values (the same three)."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's keys and values: `k, v [num_kv_heads, num_slots, head_dim]`, float32, bfloat16 or int8; each a
    contiguous view of the whole pool.

    `k_scale, v_scale [num_kv_heads, num_slots]` (float32) are there with int8 alone, one scale per token and head:
    a stored vector stands for `int8 * scale`, where `scale = absmax / 127` and `int8 = rint(x * (127 / absmax))`, in
    fp32, ties to even. A vector of zeros (all below 1e-35) has scale 0. Why not one scale for a page:
    docs/decisions/0005-kv-scales-per-token.md.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class RotateChannels(Protocol):
    """`x [rows, size] @ R` in place or, with `columns`, `R.T @ x [size, columns]`; x float32, contiguous. Returns x."""

    def __call__(self, x: Tensor, rotation: Rotation, columns: bool = False) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class RotatedWeight:
    """`(weight * gain) @ R`, made some rows at a time as it is packed: `weight [out, in]`, `gain [in]`."""

    weight: Tensor
    gain: Tensor
    rotation: Rotation
    rotate: RotateChannels

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.weight.shape

    def rows(self, first: int, end: int) -> Tensor:
        """Rows `[first, end)` in float32, contiguous."""
        return self.rotate(self.weight.detach()[first:end].float() * self.gain.float(), self.rotation)


Weight = Tensor | RotatedWeight


def stored(weight: Weight) -> Tensor:
    """The tensor behind a weight, for checks of its dtype, device and shape."""
    return weight if isinstance(weight, Tensor) else weight.weight


def whole(weight: Weight) -> Tensor:
    """A weight as one tensor."""
    return weight if isinstance(weight, Tensor) else weight.rows(0, weight.shape[0])


def stacked(first: Weight, second: Weight) -> Weight:
    """Rows of the first, then of the second; both rotated alike, or neither."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return torch.cat([whole(first), whole(second)])
    return replace(first, weight=torch.cat([first.weight, second.weight]))


class PackedLinear(Protocol):
    """A weight `[out, in]` in the form its kernel reads, with its bias."""

    @property
    def num_bytes(self) -> int:
        """Bytes held, bias included."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x [tokens, in]` → `x @ weight.T + bias (+ residual)`, a new `[tokens, out]`, in x's dtype. `residual` has
        that shape and dtype and is added last."""


class Embedding(Protocol):
    """Rows `token_ids [tokens]` (int64) of `table [vocab, size]`, in `dtype`: `[tokens, size]`."""

    def __call__(self, table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Planes:
    """Which factors of an int8 product have a second plane: what rounding to 8 bits leaves of them, in int8 again, so
    that they have some 15 bits. Each is a product more; one of the weight is its bytes again, one of the activations
    is not made where they have more than 8 bits anyway."""

    weight: bool = False
    activations: bool = False


ONE_PLANE = Planes()


class PackLinear(Protocol):
    """Operation `linear`: packs `weight [out, in]` and `bias [out]` once; the original is not kept. The weight comes in
    the context's weight dtype, where that is int8 in float32 or bfloat16, to be quantised by the kernel, as `planes`
    says; nothing else has planes."""

    def __call__(self, weight: Weight, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear: ...


class RmsNorm(Protocol):
    """`x [..., size] * rsqrt(mean(x²) + eps) * weight [size]`, the mean in fp32."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class RotaryAndStore(Protocol):
    """Rotates `q [tokens, heads, head_dim]` and `k [tokens, kv_heads, head_dim]` by `cos, sin [tokens, head_dim / 2]`
    (halves, not pairs), stores rotated k and v at `slots [tokens]` (int64) of the cache, rounded or quantised to its
    dtype, and returns the rotated q, contiguous. q, k and v may be strided views of one fused matrix."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        slots: Tensor,
    ) -> Tensor: ...


class PagedAttention(Protocol):
    """`q [tokens, heads, head_dim]` over the plan's rows → `[tokens, heads * head_dim]`; scale is 1 / sqrt(head_dim).
    One operation for read, extend and decode."""

    def __call__(self, q: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor: ...


class SiluAndMul(Protocol):
    """`gate_up [tokens, 2 * size]` → `silu(gate) * up`, `[tokens, size]`; with a `block` over 1, every `block` of its
    values, a power of two that divides size, times the Walsh-Hadamard matrix over sqrt(block)."""

    def __call__(self, gate_up: Tensor, block: int = 1) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm: `weight [size]` and eps."""

    weight: Tensor
    eps: float


class PackedBlock(Protocol):
    """A norm and the weights that follow it, in the form their kernel reads."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x [tokens, in]`, contiguous, to a new `[tokens, out]` in its dtype."""


class PackNormedLinear(Protocol):
    """Operation `normed_linear`: packs `weight [out, in]` and `bias [out]` as `linear` does, for
    `norm(x) @ weight.T + bias`. What the norm gives may be rounded to what the product takes."""

    def __call__(self, norm: Norm, weight: Weight, bias: Tensor | None) -> PackedBlock: ...


class PackGatedMlp(Protocol):
    """Operation `gated_mlp`: packs `gate, up [size, in]` and `down [in, size]` as `linear` does, for
    `x + h(silu(n @ gate.T) * (n @ up.T)) @ down.T` with n = `norm(x)`, h being what `silu_and_mul` does with a `block`.
    What is between the two products may be rounded to bfloat16, before h and after it."""

    def __call__(self, norm: Norm, gate: Weight, up: Weight, down: Weight, block: int = 1) -> PackedBlock: ...


class CopyPages(Protocol):
    """Copies whole pages within a pool `[layers, kv_heads, slots, head_dim]` or its scales `[layers, kv_heads, slots]`:
    page `source[i]` to `target[i]`."""

    def __call__(self, pool: Tensor, page_tokens: int, source: list[int], target: list[int]) -> None: ...


class LogProb(Protocol):
    """Log-probability of `targets [n]` under `head(hidden [n, size])` over the first `vocab_size` logits, `[n]` fp32.
    Logits are made in pieces and never all written out."""

    def __call__(self, hidden: Tensor, head: PackedLinear, targets: Tensor, vocab_size: int) -> Tensor: ...


class FindPeak(Protocol):
    """Operation `peak`: of one row of logits `[vocab]` in fp32, the largest value, the lowest index that has it, and
    whether any value is NaN. Where `allowed [vocab]` (bool) is False a value counts as -inf, though a NaN counts as one
    all the same. NaN is never the largest; where nothing is above -inf the index is -1."""

    def __call__(self, logits: Tensor, allowed: Tensor | None) -> tuple[float, int, bool]: ...


@dataclass(frozen=True)
class KernelSet:
    """The chosen kernel of every operation, for one model on one device. Where `normed_linear` or
    `gated_mlp` is None, a model makes it of `rms_norm`, `linear` and `silu_and_mul`."""

    embedding: Embedding
    linear: PackLinear
    rms_norm: RmsNorm
    rotary_and_store: RotaryAndStore
    paged_attention: PagedAttention
    silu_and_mul: SiluAndMul
    rotate_channels: RotateChannels
    normed_linear: PackNormedLinear | None
    gated_mlp: PackGatedMlp | None
    copy_pages: CopyPages
    log_prob: LogProb
    peak: FindPeak
