"""Native rotary_and_store: the reference's bits in every dtype, nothing written beside its slots, each token alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels import native, reference
from antiphon.kernels.native_rotary import rotary_and_store
from antiphon.kernels.ops import LayerCache

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads(), native.num_threads()
    torch.set_num_threads(1)
    native.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    native.set_num_threads(before[1])


def poisoned_cache(kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype) -> LayerCache:
    size = (kv_heads, num_slots, head_dim)
    if dtype != torch.int8:
        return LayerCache(torch.full(size, float("nan")).to(dtype), torch.full(size, float("nan")).to(dtype))
    codes, scales = torch.full(size, 99, dtype=torch.int8), torch.full(size[:2], float("nan"))
    return LayerCache(codes, codes.clone(), scales, scales.clone())


def operands(tokens: int, groups: int, kv_heads: int, head_dim: int, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v as views of one fused matrix, cos, sin, and scattered slots."""
    generator = torch.Generator().manual_seed(seed)
    heads = groups * kv_heads
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator)
    q, k, v = torch.split(fused.view(tokens, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(tokens, head_dim // 2, generator=generator) * 6
    slots = torch.randperm(-(-tokens // 64) * 64 + 64, generator=generator)[:tokens]
    return q, k, v, angles.cos(), angles.sin(), slots


def run(args: tuple[Tensor, ...], cache: LayerCache) -> Tensor:
    q, k, v, cos, sin, slots = args
    return rotary_and_store(q, k, v, cos, sin, cache, slots)


def tensors(cache: LayerCache) -> list[Tensor]:
    return [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]


def same(a: LayerCache, b: LayerCache) -> bool:
    """Equal, NaN for NaN."""
    return all(
        torch.equal(x.double().nan_to_num(1e9), y.double().nan_to_num(1e9))
        for x, y in zip(tensors(a), tensors(b), strict=True)
    )


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.integers(1, 130),
    groups=st.sampled_from([1, 2, 5, 7, 8]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([64, 128, 256, 48, 6, 2]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_any_shape_has_the_references_bits_and_leaves_other_slots(
    tokens: int, groups: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    q, k, v, cos, sin, slots = args = operands(tokens, groups, kv_heads, head_dim, seed)
    num_slots = -(-tokens // 64) * 64 + 64
    cache, expected = (poisoned_cache(kv_heads, num_slots, head_dim, dtype) for _ in range(2))
    rotated = run(args, cache)
    assert torch.equal(rotated, reference.rotary_and_store(q, k, v, cos, sin, expected, slots))
    assert rotated.is_contiguous()
    assert same(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_notices_a_slot_and_an_angle(dtype: torch.dtype) -> None:
    """Negative control."""
    q, k, v, cos, sin, slots = operands(5, 2, 2, 64)
    caches = [poisoned_cache(2, 128, 64, dtype) for _ in range(3)]
    run((q, k, v, cos, sin, slots), caches[0])
    run((q, k, v, cos, sin, slots.roll(1)), caches[1])
    run((q, k, v, cos.roll(1, 0), sin, slots), caches[2])
    assert not same(caches[0], caches[1])
    assert not same(caches[0], caches[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_alone_has_the_bits_of_one_in_a_batch_on_any_threads(dtype: torch.dtype) -> None:
    args = operands(50, 7, 2, 64)
    caches = [poisoned_cache(2, 128, 64, dtype) for _ in range(3)]
    whole = run(args, caches[0])
    alone = torch.cat([run(tuple(x[i : i + 1] for x in args), caches[1]) for i in range(50)])
    native.set_num_threads(3)
    threaded = run(args, caches[2])
    assert torch.equal(whole, alone)
    assert torch.equal(whole, threaded)
    assert same(caches[0], caches[1])
    assert same(caches[0], caches[2])


def test_values_are_rounded_and_quantised_as_torch_does() -> None:
    """Ties, infinities, NaN, subnormals and zeros; with int8 a NaN is in the scale, and zeros have scale 0."""
    special = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, torch.inf, -torch.inf, torch.nan])
    v = torch.zeros(3, 1, 8)
    v[0, 0] = special
    v[1, 0] = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5, 126.5, -127.0, 0.0])
    args = (torch.ones(3, 1, 8), torch.ones(3, 1, 8), v, torch.ones(3, 4), torch.zeros(3, 4), torch.arange(3))
    rounded = poisoned_cache(1, 64, 8, torch.bfloat16)
    run(args, rounded)
    torch.testing.assert_close(rounded.v[0, :3], v[:, 0].bfloat16(), rtol=0, atol=0, equal_nan=True)
    quantised = poisoned_cache(1, 64, 8, torch.int8)
    run(args, quantised)
    assert quantised.v_scale is not None
    assert quantised.v_scale[0, 0].isnan()
    assert quantised.v[0, 1].tolist() == [127, 0, 2, 0, -2, 126, -127, 0]
    assert quantised.v_scale[0, 1:3].tolist() == [1.0, 0.0]
    assert quantised.v[0, 2].tolist() == [0] * 8


def test_wrong_operands_are_refused_before_any_work() -> None:
    q, k, v, cos, sin, slots = operands(4, 2, 2, 64)
    cache, untouched = (poisoned_cache(2, 128, 64, torch.bfloat16) for _ in range(2))
    with pytest.raises(TypeError, match=r"k is .*bfloat16"):
        run((q, k.bfloat16(), v, cos, sin, slots), cache)
    with pytest.raises(ValueError, match="v is"):
        run((q, k, v[:3], cos, sin, slots), cache)
    with pytest.raises(ValueError, match="heads 64 apart"):
        run((torch.zeros(4, 64, 4).transpose(1, 2), k, v, cos, sin, slots), cache)
    with pytest.raises(ValueError, match="cos is"):
        run((q, k, v, cos[:, :31], sin, slots), cache)
    with pytest.raises(TypeError, match=r"slots are .*int32"):
        run((q, k, v, cos, sin, slots.int()), cache)
    for wrong in (slots - 128, slots + 128):
        with pytest.raises(ValueError, match="the cache has 128"):
            run((q, k, v, cos, sin, wrong), cache)
    assert same(cache, untouched)
    assert run(tuple(x[:0] for x in (q, k, v, cos, sin, slots)), cache).shape == (0, 4, 64)
