"""Every operation of a model step, named once. `registry.py` finds who computes it; `reference.py` is the oracle.

Keys and values lie per layer as `[num_kv_heads, num_pages * page_tokens, head_dim]`: a *slot* is one token's place in
that second axis, and pages that follow each other are one view without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

OPERATIONS = ("linear", "rms_norm", "rotary_and_store", "paged_attention", "silu_and_mul", "copy_pages", "log_prob")


@dataclass(frozen=True)
class KernelContext:
    """What a candidate may look at to say whether it can serve: `dtype` of activations, keys and values, and
    `weight_dtype` of the matrices, which may be narrower."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True)
class Run:
    """Tokens that lie in consecutive slots: `first_slot` to `first_slot + num_tokens - 1`."""

    first_slot: int
    num_tokens: int


@dataclass(frozen=True)
class AttentionRow:
    """One row of a batch: its queries are tokens `start` to `stop - 1` of the batch.

    `own` ends with their own keys, just stored; of all keys, the last query sees every one, the one before it all but
    the last, and so on::

        keys            | context run | context run | own (n tokens)       |
        query i of m    |  all seen   |  all seen   | n - (m - 1 - i) seen |

    `own` holds exactly the row's m tokens, except where m is 1: then it is one run, that may reach further back.
    """

    start: int
    stop: int
    context: tuple[Run, ...]
    own: tuple[Run, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """The rows of one batch, planned once and used by every layer."""

    rows: tuple[AttentionRow, ...]


class PackedLinear(Protocol):
    """A weight `[out, in]` in the form its kernel reads, with its bias."""

    @property
    def num_bytes(self) -> int:
        """Bytes held, bias included."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x [tokens, in]` → `x @ weight.T + bias (+ residual)`, a new `[tokens, out]`, in x's dtype. `residual` has
        that shape and dtype and is added last."""


class PackLinear(Protocol):
    """Operation `linear`: packs `weight [out, in]` (in the context's weight dtype) and `bias [out]` once; the
    original is not kept."""

    def __call__(self, weight: Tensor, bias: Tensor | None) -> PackedLinear: ...


class RmsNorm(Protocol):
    """`x [..., size] * rsqrt(mean(x²) + eps) * weight [size]`, the mean in fp32."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class RotaryAndStore(Protocol):
    """Rotates `q [tokens, heads, head_dim]` and `k [tokens, kv_heads, head_dim]` by `cos, sin [tokens, head_dim / 2]`
    (halves, not pairs), stores k and v at `slots [tokens]` of this layer's pool, and returns the rotated q."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        slots: Tensor,
    ) -> Tensor: ...


class PagedAttention(Protocol):
    """`q [tokens, heads, head_dim]` over the plan's runs → `[tokens, heads * head_dim]`; scale is 1 / sqrt(head_dim).
    One operation for read, extend and decode."""

    def __call__(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan) -> Tensor: ...


class SiluAndMul(Protocol):
    """`gate_up [tokens, 2 * size]` → `silu(gate) * up`, `[tokens, size]`."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class CopyPages(Protocol):
    """Copies whole pages within a pool `[layers, kv_heads, slots, head_dim]`: page `source[i]` to `target[i]`."""

    def __call__(self, pool: Tensor, page_tokens: int, source: list[int], target: list[int]) -> None: ...


class LogProb(Protocol):
    """Log-probability of `targets [n]` under `head(hidden [n, size])` over the first `vocab_size` logits, `[n]` fp32.
    Logits are made in pieces and never all written out."""

    def __call__(self, hidden: Tensor, head: PackedLinear, targets: Tensor, vocab_size: int) -> Tensor: ...


@dataclass(frozen=True)
class KernelSet:
    """The chosen kernel of every operation, for one model on one device."""

    linear: PackLinear
    rms_norm: RmsNorm
    rotary_and_store: RotaryAndStore
    paged_attention: PagedAttention
    silu_and_mul: SiluAndMul
    copy_pages: CopyPages
    log_prob: LogProb
