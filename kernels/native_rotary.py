"""Rotary embedding and the store of keys and values in C++ (csrc/cpu/rotary_store.h), each token on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels import native
from antiphon.kernels.native_cache import STORAGES, addresses, check_cache, check_float32
from antiphon.kernels.ops import LayerCache


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, slots: Tensor
) -> Tensor:
    """See `ops.RotaryAndStore`. q, k and v are float32 on the CPU, each token's heads contiguous, tokens any stride
    apart; cos, sin `[tokens, head_dim / 2]` and slots (int64) contiguous.

    TypeError or ValueError, before any work, for another dtype, shape or layout, and for a slot that is not there. Two
    tokens must not have one slot. Runs without the interpreter's lock, on the pool's threads.
    """
    check_cache(cache)
    kv_heads, num_slots, head_dim = cache.k.shape
    num_tokens, num_heads = q.shape[0], q.shape[1]
    for name, x, heads in (("q", q, num_heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        check_float32(name, x)
        apart = heads == 1 or x.stride(1) == head_dim
        if x.shape != (num_tokens, heads, head_dim) or not apart or x.stride(2) != 1:
            raise ValueError(
                f"{name} is {tuple(x.shape)} with strides {x.stride()}; need {(num_tokens, heads, head_dim)} with "
                f"heads {head_dim} apart"
            )
    _check_angles(cos, sin, num_tokens, head_dim)
    _check_slots(slots, num_tokens)
    module = native.extension()
    out = torch.empty(num_tokens, num_heads, head_dim)
    stored = module.rotary_and_store(
        *(number for x in (q, k, v) for number in (x.data_ptr(), x.stride(0))),
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        num_tokens,
        num_heads,
        module.KvShape(STORAGES[cache.k.dtype], kv_heads, num_slots, head_dim),
        *addresses(cache),
        out.data_ptr(),
    )
    if not stored:
        raise ValueError(f"slots reach from {int(slots.min())} to {int(slots.max())}; the cache has {num_slots}")
    return out


def _check_angles(cos: Tensor, sin: Tensor, num_tokens: int, head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; it must be even to be rotated by halves")
    for name, x in (("cos", cos), ("sin", sin)):
        check_float32(name, x)
        if x.shape != (num_tokens, head_dim // 2) or not x.is_contiguous():
            raise ValueError(f"{name} is {tuple(x.shape)}; need contiguous {(num_tokens, head_dim // 2)}")


def _check_slots(slots: Tensor, num_tokens: int) -> None:
    if slots.dtype != torch.int64 or slots.device.type != "cpu":
        raise TypeError(f"slots are {slots.dtype} on {slots.device}; need int64 on the CPU")
    if slots.shape != (num_tokens,) or not slots.is_contiguous():
        raise ValueError(f"slots are {tuple(slots.shape)}; need contiguous ({num_tokens},)")
