"""torch's fast paths on the CPU give what the reference gives, at every odd size, and read none but the valid slots."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.kernels import reference, torch_cpu
from antiphon.kernels.ops import AttentionPlan, AttentionRow, KernelContext, Run

ROWS = [1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 130]
CONTEXTS = [0, 1, 63, 64, 65, 129]
POOL_TOKENS = 1024


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


class PoisonedPool:
    """A pool of NaN, in which rows are laid one after another, in runs with holes between them."""

    def __init__(self, kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        self.k = torch.full((kv_heads, POOL_TOKENS, size), math.nan, dtype=dtype)
        self.v = torch.full((kv_heads, POOL_TOKENS, size), math.nan, dtype=dtype)
        self._next = 3

    def runs(self, *lengths: int) -> tuple[Run, ...]:
        runs = []
        for length in lengths:
            if length:
                runs.append(Run(self._next, length))
                shape = (self.k.shape[0], length, self.k.shape[2])
                span = slice(self._next, self._next + length)
                self.k[:, span] = random(*shape, seed=self._next, dtype=self.k.dtype)
                self.v[:, span] = random(*shape, seed=self._next + 1, dtype=self.k.dtype)
                self._next += length + 5
        return tuple(runs)


def check_attention(pool: PoisonedPool, num_heads: int, rows: tuple[AttentionRow, ...]) -> None:
    q = random(rows[-1].stop, num_heads, pool.k.shape[2], seed=7, dtype=pool.k.dtype)
    plan = AttentionPlan(rows)
    expected = reference.paged_attention(q, pool.k, pool.v, plan)
    assert not expected.isnan().any()
    found = torch_cpu.paged_attention(q, pool.k, pool.v, plan)
    assert found.dtype == q.dtype
    torch.testing.assert_close(found, expected, **tolerance(q.dtype))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_tokens", ROWS)
def test_attention_equals_the_reference_over_odd_lengths(num_tokens: int, context: int) -> None:
    pool = PoisonedPool(2, 16)
    row = AttentionRow(0, num_tokens, pool.runs(context), pool.runs(num_tokens))
    check_attention(pool, 6, (row,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("num_groups", [1, 2, 5, 7, 8])
def test_attention_equals_the_reference_for_every_grouping_and_head_size(
    num_groups: int, size: int, dtype: torch.dtype
) -> None:
    pool = PoisonedPool(2, size, dtype)
    extend = AttentionRow(0, 65, pool.runs(64, 1, 63), pool.runs(40, 25))
    decode = AttentionRow(65, 66, pool.runs(129), pool.runs(70))
    check_attention(pool, 2 * num_groups, (extend, decode))


def test_rows_that_share_a_context_each_see_it_and_their_own_tokens() -> None:
    """Rows of 1, 5 and 64 tokens behind one prefix of two runs, one of them behind a third run as well."""
    pool = PoisonedPool(2, 16)
    shared, other = pool.runs(128, 30), pool.runs(65)
    rows = (
        AttentionRow(0, 1, shared, pool.runs(1)),
        AttentionRow(1, 6, (*shared, *other), pool.runs(5)),
        AttentionRow(6, 70, shared[:1], pool.runs(64)),
        AttentionRow(70, 71, (), pool.runs(9)),
    )
    check_attention(pool, 4, rows)


def test_attention_can_fail_with_a_slot_shifted_or_an_invalid_one_read() -> None:
    pool = PoisonedPool(2, 16)
    row = AttentionRow(0, 3, pool.runs(64), pool.runs(3))
    q = random(3, 4, 16, seed=7)
    expected = reference.paged_attention(q, pool.k, pool.v, AttentionPlan((row,)))
    context = row.context[0]
    shorter = replace(row, context=(Run(context.first_slot + 1, 63),))
    assert not torch.allclose(torch_cpu.paged_attention(q, pool.k, pool.v, AttentionPlan((shorter,))), expected)
    longer = replace(row, context=(Run(context.first_slot, 65),))
    assert torch_cpu.paged_attention(q, pool.k, pool.v, AttentionPlan((longer,))).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_reference_for_any_number_of_rows(bias: bool, dtype: torch.dtype) -> None:
    if torch_cpu.linear_reason(KernelContext("cpu", dtype, dtype, 64)) is not None:
        assert dtype == torch.bfloat16  # float32 is served by every processor
        return
    weight = random(75, 33, dtype=dtype)
    offset = random(75, seed=1, dtype=dtype) if bias else None
    packed = torch_cpu.linear(weight, offset)
    oracle = reference.linear(weight, offset)
    for rows in (0, *range(1, 131)):
        x = random(rows, 33, seed=rows, dtype=dtype)
        torch.testing.assert_close(packed(x), oracle(x), **tolerance(dtype))
        residual = random(rows, 75, seed=rows + 1, dtype=dtype)
        torch.testing.assert_close(packed(x, residual), oracle(x, residual), **tolerance(dtype))
    assert packed.num_bytes == oracle.num_bytes
    assert not torch.allclose(torch_cpu.linear(weight.roll(1, 0), offset)(x), oracle(x), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (130, 48), (65, 3, 16)])
def test_rms_norm_equals_the_reference_and_leaves_its_input(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], seed=1, dtype=dtype)
    before = x.clone()
    found = torch_cpu.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, reference.rms_norm(x, weight, 1e-6), **tolerance(dtype))
    assert torch.equal(x, before)
    if len(x):
        assert not torch.allclose(found, reference.rms_norm(x, weight, 1.0), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_rotary_and_store_equals_the_reference_and_writes_no_other_slot(rows: int, dtype: torch.dtype) -> None:
    q, k, v = (
        random(rows, 6, 16, dtype=dtype),
        random(rows, 2, 16, seed=1, dtype=dtype),
        random(rows, 2, 16, dtype=dtype),
    )
    angles = random(rows, 8, seed=3)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(4))[:rows]
    pools = [torch.full((2, 200, 16), math.nan, dtype=dtype) for _ in range(4)]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = reference.rotary_and_store(q, k, v, cos, sin, pools[0], pools[1], slots)
    torch.testing.assert_close(torch_cpu.rotary_and_store(q, k, v, cos, sin, pools[2], pools[3], slots), expected)
    for found, wanted in ((pools[2], pools[0]), (pools[3], pools[1])):
        torch.testing.assert_close(found, wanted, equal_nan=True)
        assert int(found[0, :, 0].isfinite().sum()) == rows
    other = torch_cpu.rotary_and_store(q, k, v, cos, -sin, pools[2], pools[3], slots)
    assert not torch.allclose(other, expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 64, 130])
def test_silu_and_mul_equals_the_reference_and_leaves_its_input(rows: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 88, dtype=dtype)
    before = gate_up.clone()
    found = torch_cpu.silu_and_mul(gate_up)
    torch.testing.assert_close(found, reference.silu_and_mul(gate_up), **tolerance(dtype))
    assert torch.equal(gate_up, before)
    if rows:
        assert not torch.allclose(found, reference.silu_and_mul(gate_up.roll(44, 1)), **tolerance(dtype))


def test_linear_says_why_it_cannot_serve_bfloat16_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    context = KernelContext("cpu", torch.bfloat16, torch.bfloat16, 64)
    monkeypatch.setattr(torch_cpu, "bf16_is_fast", lambda: False)
    assert "AVX-512 or AMX" in (torch_cpu.linear_reason(context) or "")
    assert torch_cpu.linear_reason(KernelContext("cpu", torch.float32, torch.float32, 64)) is None
    assert "not served" in (torch_cpu.linear_reason(replace(context, dtype=torch.float32)) or "")
