"""Small prefix states, and whether two are the same."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from antiphon.engine.tiers import PrefixState

DTYPES = (torch.bfloat16, torch.float32, torch.int8)


def random_state(
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    *,
    first_token: int = 64,
    num_tokens: int = 5,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 8,
) -> PrefixState:
    """A state of `num_tokens` tokens behind `first_token`, its key made of the seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, kv_heads, num_tokens, head_dim)
    token_ids = tuple(torch.randint(0, 150_000, (first_token + num_tokens,), generator=generator).tolist())
    key = hashlib.sha256(str(seed).encode()).digest()
    if dtype == torch.int8:
        k, v = (torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for _ in "kv")
        k_scale, v_scale = (torch.rand(shape[:3], generator=generator) for _ in "kv")
        return PrefixState(key, token_ids, first_token, k, v, k_scale, v_scale)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in "kv")
    return PrefixState(key, token_ids, first_token, k, v)


def flipped(state: PrefixState, name: str) -> PrefixState:
    """The same state with the lowest bit of one number changed."""
    tensor = state.tensors[name].clone()
    tensor.view(torch.uint8).view(-1)[0] ^= 1
    return replace(state, **{name: tensor})


def same_state(left: PrefixState, right: PrefixState) -> bool:
    """Whether all of two states is equal, numbers bit for bit."""
    if (left.key, left.token_ids, left.first_token) != (right.key, right.token_ids, right.first_token):
        return False
    if left.tensors.keys() != right.tensors.keys():
        return False
    pairs = ((tensor, right.tensors[name]) for name, tensor in left.tensors.items())
    return all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.is_contiguous() == other.is_contiguous()
        and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in pairs
    )
