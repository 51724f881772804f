"""The reference computes what the operations are defined as: checked against maths written out element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_plans import attention_plan, poisoned_cache
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.attention_plan import AttentionRow, Run
from antiphon.kernels.ops import LayerCache

PAGE = 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def naive_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`[m, heads, d]` over `[n, kv_heads, d]`: query i of m sees the first n - (m - 1 - i) keys."""
    num_queries, num_heads, size = queries.shape
    num_groups = num_heads // keys.shape[1]
    out = torch.zeros_like(queries)
    for i in range(num_queries):
        for head in range(num_heads):
            seen = range(keys.shape[0] - (num_queries - 1 - i))
            scores = [float(queries[i, head] @ keys[j, head // num_groups]) / math.sqrt(size) for j in seen]
            weights = [math.exp(score - max(scores)) for score in scores]
            for j, weight in zip(seen, weights, strict=True):
                out[i, head] += weight / sum(weights) * values[j, head // num_groups]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention_over_scattered_pages_is_softmax_over_the_keys_in_order(dtype: torch.dtype) -> None:
    """9 context tokens in pages 5 and 0 and one token of page 3, 2 own tokens behind it; all other slots are NaN."""
    slots = [*range(20, 24), *range(0, 4), *range(12, 15)]
    cache = poisoned_cache(2, 28, 6, dtype)
    keys, values = stored(cache, slots, random(11, 2, 6, seed=1), random(11, 2, 6, seed=2))
    q = random(3, 6, 6, seed=3)
    plan = attention_plan([(9, 2, [5, 0, 3]), (6, 1, [5, 0])], PAGE)
    assert plan.rows[0] == AttentionRow(0, 2, (Run(20, 4), Run(0, 4), Run(12, 1)), (Run(13, 2),))
    out = reference.paged_attention(q, cache, plan).view(3, 6, 6)
    torch.testing.assert_close(out[:2], naive_attention(q[:2], keys, values))
    torch.testing.assert_close(out[2:], naive_attention(q[2:], keys[:7], values[:7]))
    beyond = attention_plan([(10, 2, [5, 0, 3])], PAGE)
    assert reference.paged_attention(q[:2], cache, beyond)[1].isnan().all(), "a slot that nobody wrote must show"


def stored(cache: LayerCache, slots: list[int], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Writes `keys, values [n, kv_heads, d]` at `slots`, and returns what they are when read: in fp32."""
    read = []
    for x, pool, scales in ((keys, cache.k, cache.k_scale), (values, cache.v, cache.v_scale)):
        if scales is None:
            pool[:, slots] = x.transpose(0, 1).to(pool.dtype)
            read.append(pool[:, slots].float().transpose(0, 1))
        else:
            scale = x.abs().amax(-1) / 127
            pool[:, slots] = (x / scale[..., None]).round().to(torch.int8).transpose(0, 1)
            scales[:, slots] = scale.T
            read.append(pool[:, slots].transpose(0, 1) * scale[..., None])
    return read[0], read[1]


def test_attention_can_fail_with_one_key_too_many() -> None:
    keys, values, q = random(1, 8, 4, seed=1), random(1, 8, 4, seed=2), random(2, 1, 4, seed=3)
    plan, shifted = (attention_plan([(context, 2, [0, 1])], PAGE) for context in (2, 3))
    expected = naive_attention(q, keys[0, :4, None], values[0, :4, None]).view(2, 4)
    cache = LayerCache(keys, values)
    torch.testing.assert_close(reference.paged_attention(q, cache, plan), expected)
    assert not torch.allclose(reference.paged_attention(q, cache, shifted), expected)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = random(3, 5), random(5, seed=1)
    for row, out in zip(x, reference.rms_norm(x, weight, 0.25), strict=True):
        root = math.sqrt(sum(float(value) ** 2 for value in row) / 5 + 0.25)
        assert out.tolist() == pytest.approx([float(a) / root * float(b) for a, b in zip(row, weight, strict=True)])


def test_rotary_turns_each_pair_of_halves_by_its_angle_and_stores_only_at_its_slots() -> None:
    q, k, v, angles = random(3, 2, 4), random(3, 1, 4, seed=1), random(3, 1, 4, seed=2), random(3, 2, seed=3)
    cache = poisoned_cache(1, 8, 4)
    slots = torch.tensor([6, 1, 2])
    out = reference.rotary_and_store(q, k, v, angles.cos(), angles.sin(), cache, slots)
    for token, slot in enumerate(slots.tolist()):
        for pair in range(2):
            turn = complex(math.cos(angles[token, pair]), math.sin(angles[token, pair]))
            for turned, plain in ((out[token, 1], q[token, 1]), (cache.k[0, slot], k[token, 0])):
                expected = complex(float(plain[pair]), float(plain[pair + 2])) * turn
                assert (float(turned[pair]), float(turned[pair + 2])) == pytest.approx((expected.real, expected.imag))
        assert torch.equal(cache.v[0, slot], v[token, 0])
    untouched = [0, 3, 4, 5, 7]
    assert cache.k[0, untouched].isnan().all() and cache.v[0, untouched].isnan().all()


def test_a_bfloat16_cache_rounds_to_the_nearest_and_ties_to_even() -> None:
    step = 2.0**-7
    v = torch.tensor([1 + step / 2, 1 + step * 1.5, 1 + step * 0.49, -1 - step / 2]).view(1, 1, 4)
    cache = store(v, torch.bfloat16)
    assert cache.v[0, 0].tolist() == [1.0, 1 + 2 * step, 1.0, -1.0]


def test_an_int8_cache_has_one_scale_for_each_token_and_head_and_ties_go_to_even() -> None:
    v = torch.stack((random(5, 6, seed=1), 1e-3 * random(5, 6, seed=2)), dim=1)
    v[3, 0] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -126.5])
    v[4, 1] = 0
    cache = store(v, torch.int8)
    assert cache.v_scale is not None
    for token, head in np.ndindex(5, 2):
        x = v[token, head].numpy()
        absmax = np.abs(x).max()
        factor = np.float32(127) / absmax if absmax else np.float32(0)  # one rounding, then the product's
        assert cache.v[head, token].tolist() == np.rint(x * factor).tolist()
        assert cache.v_scale[head, token].item() == absmax / np.float32(127)
    assert cache.v[0, 3].tolist() == [127, 0, 2, 2, 0, -126]
    assert cache.v[1, 4].tolist() == [0] * 6 and cache.v_scale[1, 4] == 0


def test_int8_values_are_rounded_exactly_as_promised_to_the_last_bit() -> None:
    """3.2 million values: some lie so near a tie that a factor rounded twice stores another integer."""
    x = torch.rand(50_000, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    absmax = np.abs(x.numpy()).max(-1, keepdims=True)
    found, scale = reference.stored_form(x, torch.int8)
    assert np.array_equal(found.numpy(), np.rint(x.numpy() * (np.float32(127) / absmax)))
    assert np.array_equal(scale.numpy(), absmax[:, 0] / np.float32(127))
    twice = (np.float32(1) / absmax) * np.float32(127)
    assert not np.array_equal(found.numpy(), np.rint(x.numpy() * twice))


@pytest.mark.parametrize("value", [math.nan, 2e-35, 1e-38, 2e-45])
def test_an_int8_cache_keeps_a_nan_and_stores_what_is_almost_nothing_as_nothing(value: float) -> None:
    cache = store(torch.tensor([[[value, 0.0, -value, value / 2]]]), torch.int8)
    assert cache.v_scale is not None
    read = cache.v[0, 0] * cache.v_scale[0, 0]
    if math.isnan(value):
        assert read.isnan().all()
    else:
        assert read.tolist() == pytest.approx([value, 0, -value, value / 2] if value > 1e-35 else [0] * 4, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_token_is_stored_alike_alone_and_in_a_crowd(dtype: torch.dtype) -> None:
    """What was stored before does not change as tokens are appended, and neither does their own form."""
    v = 10 ** torch.arange(-4.0, 4.0).view(8, 1, 1) * random(8, 2, 6)
    crowd = store(v, dtype)
    for token in range(8):
        alone = store(v[token : token + 1], dtype)
        assert torch.equal(alone.v[:, 0], crowd.v[:, token])
        if alone.v_scale is not None and crowd.v_scale is not None:
            assert torch.equal(alone.v_scale[:, 0], crowd.v_scale[:, token])


def store(v: Tensor, dtype: torch.dtype) -> LayerCache:
    """A cache with `v [tokens, kv_heads, d]` as keys and as values of slots 0, 1, …"""
    tokens, kv_heads, size = v.shape
    cache = poisoned_cache(kv_heads, tokens, size, dtype)
    cos, sin = torch.ones(tokens, size // 2), torch.zeros(tokens, size // 2)
    reference.rotary_and_store(v, v, v, cos, sin, cache, torch.arange(tokens))
    assert torch.equal(cache.k, cache.v)
    return cache


def test_silu_and_mul_takes_the_first_half_as_the_gate() -> None:
    out = reference.silu_and_mul(torch.tensor([[1.0, -2.0, 3.0, 5.0]]))
    assert out[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)) * 3, -2 / (1 + math.exp(2)) * 5])


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_a_dot_product_per_output_and_says_its_bytes(bias: bool) -> None:
    weight, x, offset = random(3, 5), random(2, 5, seed=1), random(3, seed=2) if bias else None
    packed = reference.linear(weight, offset)
    expected = [
        [float(row @ column) + (float(offset[i]) if offset is not None else 0.0) for i, column in enumerate(weight)]
        for row in x
    ]
    torch.testing.assert_close(packed(x), torch.tensor(expected))
    residual = random(2, 3, seed=3)
    assert torch.equal(packed(x, residual), packed(x) + residual)
    assert torch.equal(residual, random(2, 3, seed=3))
    assert packed.num_bytes == 4 * (15 + 3 * bias)


@pytest.mark.parametrize("shape", [(2, 3, 5 * PAGE, 2), (2, 3, 5 * PAGE)])
def test_copy_pages_moves_whole_pages_in_every_layer_and_head_and_nothing_else(shape: tuple[int, ...]) -> None:
    pool = random(*shape)
    before = pool.clone()
    reference.copy_pages(pool, PAGE, [4, 0], [1, 3])
    for page, source in enumerate([0, 4, 2, 0, 4]):
        assert torch.equal(
            pool[:, :, page * PAGE : (page + 1) * PAGE], before[:, :, source * PAGE : (source + 1) * PAGE]
        )


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 130])
def test_log_prob_is_the_log_softmax_over_the_first_ids_alone(rows: int) -> None:
    """Ids from 7 on are padding: they take no share of the probability."""
    hidden, weight = random(rows, 4), random(9, 4, seed=1)
    targets = torch.arange(rows) % 7
    found = reference.log_prob(hidden, reference.linear(weight, None), targets, 7)
    assert found.shape == (rows,)
    for row, target, value in zip(hidden, targets.tolist(), found.tolist(), strict=True):
        logits = [float(row @ weight[token_id]) for token_id in range(7)]
        assert value == pytest.approx(logits[target] - math.log(sum(map(math.exp, logits))), abs=1e-5)
