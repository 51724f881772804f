"""torch's fast paths on the CPU give what the reference gives, at every odd size, and read none but the valid slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_plans import PlanRow, attention_plan, poisoned_cache
from torch import Tensor

from antiphon.kernels import reference, torch_cpu
from antiphon.kernels.ops import KernelContext

ROWS = [1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 130]
CONTEXTS = [0, 1, 63, 64, 65, 129]
POOL_TOKENS = 1024


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


class PoisonedPool:
    """A cache of NaN, in which rows are laid one after another, in pages that leave holes between them."""

    def __init__(self, kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        self.cache = poisoned_cache(kv_heads, POOL_TOKENS, size, dtype)
        self._next_page = 1

    def row(self, context: int, new: int, shared: Sequence[int] = ()) -> PlanRow:
        """A row of `context` tokens, the first of them in the full pages `shared`, and `new` ones: in pages by twos."""
        pages = list(shared)
        while len(pages) * 64 < context + new:
            pages.append(self._next_page)
            self._next_page += 1 + len(pages) % 2
        for position in range(len(shared) * 64, context + new):
            slot = pages[position // 64] * 64 + position % 64
            for seed, pool in enumerate((self.cache.k, self.cache.v)):
                pool[:, slot] = random(pool.shape[0], pool.shape[2], seed=2 * slot + seed, dtype=pool.dtype)
        return context, new, pages


def check_attention(pool: PoisonedPool, num_heads: int, rows: Sequence[PlanRow]) -> None:
    plan = attention_plan(rows)
    q = random(plan.rows[-1].stop, num_heads, pool.cache.k.shape[2], seed=7, dtype=pool.cache.k.dtype)
    expected = reference.paged_attention(q, pool.cache, plan)
    assert not expected.isnan().any()
    found = torch_cpu.paged_attention(q, pool.cache, plan)
    assert found.dtype == q.dtype
    torch.testing.assert_close(found, expected, **tolerance(q.dtype))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_tokens", ROWS)
def test_attention_equals_the_reference_over_odd_lengths(num_tokens: int, context: int) -> None:
    pool = PoisonedPool(2, 16)
    check_attention(pool, 6, [pool.row(context, num_tokens)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("num_groups", [1, 2, 5, 7, 8])
def test_attention_equals_the_reference_for_every_grouping_and_head_size(
    num_groups: int, size: int, dtype: torch.dtype
) -> None:
    pool = PoisonedPool(2, size, dtype)
    check_attention(pool, 2 * num_groups, [pool.row(130, 65), pool.row(198, 1)])


def test_rows_that_share_a_context_each_see_it_and_their_own_tokens() -> None:
    """Rows of 1, 5 and 64 tokens behind one prefix of two runs, one of them behind more context as well."""
    pool = PoisonedPool(2, 16)
    first = pool.row(192, 1)
    shared = first[2][:3]
    rows = [first, pool.row(192 + 65, 5, shared), pool.row(64, 64, shared[:1]), pool.row(8, 1)]
    check_attention(pool, 4, rows)


def test_attention_can_fail_with_a_token_too_few_or_an_invalid_one_read() -> None:
    pool = PoisonedPool(2, 16)
    context, new, pages = pool.row(61, 3)
    q = random(3, 4, 16, seed=7)
    expected = reference.paged_attention(q, pool.cache, attention_plan([(context, new, pages)]))
    shorter = attention_plan([(context - 1, new, pages)])
    assert not torch.allclose(torch_cpu.paged_attention(q, pool.cache, shorter), expected)
    longer = attention_plan([(context + 1, new, [*pages, pages[-1] + 1])])
    assert torch_cpu.paged_attention(q, pool.cache, longer)[-1].isnan().all()


def test_attention_says_why_it_cannot_serve_keys_and_values_in_another_dtype() -> None:
    wide = KernelContext("cpu", torch.float32, torch.float32, torch.float32, 64)
    narrow = replace(wide, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert torch_cpu.attention_reason(wide) is None and torch_cpu.attention_reason(narrow) is None
    for kv_dtype in (torch.bfloat16, torch.int8):
        assert f"{kv_dtype} under" in (torch_cpu.attention_reason(replace(wide, kv_dtype=kv_dtype)) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_reference_for_any_number_of_rows(bias: bool, dtype: torch.dtype) -> None:
    if torch_cpu.linear_reason(KernelContext("cpu", dtype, dtype, dtype, 64)) is not None:
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


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_rotary_and_store_equals_the_reference_and_writes_no_other_slot(
    rows: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    q, k, v = random(rows, 10, 16, dtype=dtype).split((6, 2, 2), dim=1)  # strided, as the fused projection's parts are
    angles = random(rows, 8, seed=3)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(4))[:rows]
    caches = [poisoned_cache(2, 200, 16, kv_dtype) for _ in range(3)]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = reference.rotary_and_store(q, k, v, cos, sin, caches[0], slots)
    found = torch_cpu.rotary_and_store(q, k, v, cos, sin, caches[1], slots)
    assert torch.equal(found, expected) and found.is_contiguous()
    for name in ("k", "v", "k_scale", "v_scale"):
        pool, wanted = getattr(caches[1], name), getattr(caches[0], name)
        torch.testing.assert_close(pool, wanted, rtol=0, atol=0, equal_nan=True)
        if pool is not None and pool.is_floating_point():
            assert int(pool[0].view(200, -1)[:, 0].isfinite().sum()) == rows
    other = torch_cpu.rotary_and_store(q, k, v, cos, -sin, caches[2], slots)
    assert not torch.allclose(other, expected, **tolerance(dtype))
    assert not torch.equal(caches[2].k[:, slots], caches[0].k[:, slots])


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
    context = KernelContext("cpu", torch.bfloat16, torch.bfloat16, torch.bfloat16, 64)
    monkeypatch.setattr(torch_cpu, "bf16_is_fast", lambda: False)
    assert "AVX-512 or AMX" in (torch_cpu.linear_reason(context) or "")
    assert torch_cpu.linear_reason(KernelContext("cpu", torch.float32, torch.float32, torch.float32, 64)) is None
    assert "not served" in (torch_cpu.linear_reason(replace(context, dtype=torch.float32)) or "")
