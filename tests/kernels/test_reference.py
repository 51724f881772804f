"""The reference computes what the operations are defined as: checked against maths written out element by element."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference
from antiphon.kernels.ops import AttentionPlan, AttentionRow, Run

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


def test_attention_over_scattered_pages_is_softmax_over_the_keys_in_order() -> None:
    """9 context tokens in pages 5 and 0 and one token of page 3, 2 own tokens behind it; all other slots are NaN."""
    slots = [*range(20, 24), *range(0, 4), *range(12, 15)]
    keys, values = random(11, 2, 6, seed=1), random(11, 2, 6, seed=2)
    k_pool, v_pool = torch.full((2, 28, 6), math.nan), torch.full((2, 28, 6), math.nan)
    k_pool[:, slots], v_pool[:, slots] = keys.transpose(0, 1), values.transpose(0, 1)
    q = random(3, 6, 6, seed=3)
    lone = AttentionRow(2, 3, (Run(20, 4),), (Run(0, 3),))
    row = AttentionRow(0, 2, (Run(20, 4), Run(0, 4), Run(12, 1)), (Run(13, 2),))
    out = reference.paged_attention(q, k_pool, v_pool, AttentionPlan((row, lone))).view(3, 6, 6)
    torch.testing.assert_close(out[:2], naive_attention(q[:2], keys, values))
    torch.testing.assert_close(out[2:], naive_attention(q[2:], keys[:7], values[:7]))


def test_attention_can_fail_with_one_key_too_many() -> None:
    keys, values, q = random(1, 5, 4, seed=1), random(1, 5, 4, seed=2), random(2, 1, 4, seed=3)
    plan = AttentionPlan((AttentionRow(0, 2, (Run(0, 2),), (Run(2, 2),)),))
    shifted = AttentionPlan((AttentionRow(0, 2, (Run(0, 3),), (Run(3, 2),)),))
    expected = naive_attention(q, keys[0, :4, None], values[0, :4, None]).view(2, 4)
    torch.testing.assert_close(reference.paged_attention(q, keys, values, plan), expected)
    assert not torch.allclose(reference.paged_attention(q, keys, values, shifted), expected)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = random(3, 5), random(5, seed=1)
    for row, out in zip(x, reference.rms_norm(x, weight, 0.25), strict=True):
        root = math.sqrt(sum(float(value) ** 2 for value in row) / 5 + 0.25)
        assert out.tolist() == pytest.approx([float(a) / root * float(b) for a, b in zip(row, weight, strict=True)])


def test_rotary_turns_each_pair_of_halves_by_its_angle_and_stores_only_at_its_slots() -> None:
    q, k, v, angles = random(3, 2, 4), random(3, 1, 4, seed=1), random(3, 1, 4, seed=2), random(3, 2, seed=3)
    k_pool, v_pool = torch.full((1, 8, 4), math.nan), torch.full((1, 8, 4), math.nan)
    slots = torch.tensor([6, 1, 2])
    out = reference.rotary_and_store(q, k, v, angles.cos(), angles.sin(), k_pool, v_pool, slots)
    for token, slot in enumerate(slots.tolist()):
        for pair in range(2):
            turn = complex(math.cos(angles[token, pair]), math.sin(angles[token, pair]))
            for turned, plain in ((out[token, 1], q[token, 1]), (k_pool[0, slot], k[token, 0])):
                expected = complex(float(plain[pair]), float(plain[pair + 2])) * turn
                assert (float(turned[pair]), float(turned[pair + 2])) == pytest.approx((expected.real, expected.imag))
        assert torch.equal(v_pool[0, slot], v[token, 0])
    untouched = [0, 3, 4, 5, 7]
    assert k_pool[0, untouched].isnan().all() and v_pool[0, untouched].isnan().all()


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
    assert packed.num_bytes == 4 * (15 + 3 * bias)


def test_copy_pages_moves_whole_pages_in_every_layer_and_head_and_nothing_else() -> None:
    pool = random(2, 3, 5 * PAGE, 2)
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
