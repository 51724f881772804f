"""Native paged attention: right against float64, and the same bits however rows, steps, pages and threads fall."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels import native
from antiphon.kernels.native_attention import paged_attention
from antiphon.kernels.ops import AttentionPlan, LayerCache
from antiphon.kernels.reference import stored_form

PAGE = 64
EPSILON = 2.0**-24
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@pytest.fixture(params=["amx", "avx512_bf16", "avx2", "portable"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each form that this machine can run; a form it cannot run has nothing to check here."""
    name: str = request.param if request.param in native.supported_isas() else "portable"
    monkeypatch.setenv(native.ISA_VARIABLE, name)
    return name


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads(), native.num_threads()
    torch.set_num_threads(1)
    native.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    native.set_num_threads(before[1])


@dataclass(frozen=True)
class Shape:
    groups: int = 7
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class History:
    """All queries, keys and values of one row: `q [tokens, heads, head_dim]`, `k, v [kv_heads, tokens, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor

    def first(self, num_tokens: int) -> History:
        return History(self.q[:num_tokens], self.k[:, :num_tokens], self.v[:, :num_tokens])


def sequence(num_tokens: int, shape: Shape, seed: int = 0) -> History:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_tokens, shape.kv_heads * shape.groups, shape.head_dim, generator=generator)
    k, v = torch.randn(2, shape.kv_heads, num_tokens, shape.head_dim, generator=generator)
    return History(q, k, v)


def forked(prefix: History, num_tokens: int, shape: Shape, seed: int) -> History:
    """The prefix, and that many tokens more of its own."""
    own = sequence(num_tokens, shape, seed)
    return History(torch.cat([prefix.q, own.q]), torch.cat([prefix.k, own.k], 1), torch.cat([prefix.v, own.v], 1))


def attend(rows: list[tuple[History, int]], shape: Shape, *, seed: int = 0, shared_pages: int = 0) -> list[Tensor]:
    """Each row's new tokens from position `context` on, in one call: `[new, heads, head_dim]` per row. Pages lie
    scattered and whatever no row owns is NaN. The first `shared_pages` of all rows are the first row's."""
    own_pages = [-(-row.q.shape[0] // PAGE) for row, _ in rows]
    num_pages = sum(own_pages) + 2
    order = iter(torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist())
    cache = poisoned_cache(num_pages, shape)
    tables = torch.full((len(rows), max(own_pages) + 1), -1, dtype=torch.int32)
    for i, (row, _) in enumerate(rows):
        for page in range(own_pages[i]):
            shared = i > 0 and page < shared_pages
            tables[i, page] = tables[0, page] if shared else next(order)
            fill(cache, int(tables[i, page]), row, page)
    starts = torch.tensor([0] + [row.q.shape[0] - context for row, context in rows]).cumsum(0)
    plan = AttentionPlan(tables, starts, torch.tensor([context for _, context in rows]))
    q = torch.cat([row.q[context:] for row, context in rows])
    out = paged_attention(q, cache, plan).view(q.shape)
    return list(torch.split(out, starts.diff().tolist()))


def poisoned_cache(num_pages: int, shape: Shape) -> LayerCache:
    size = (shape.kv_heads, num_pages * PAGE, shape.head_dim)
    if shape.dtype != torch.int8:
        return LayerCache(
            torch.full(size, float("nan")).to(shape.dtype), torch.full(size, float("nan")).to(shape.dtype)
        )
    codes, scales = torch.full(size, 99, dtype=torch.int8), torch.full(size[:2], float("nan"))
    return LayerCache(codes, codes.clone(), scales, scales.clone())


def fill(cache: LayerCache, page: int, row: History, block: int) -> None:
    for x, pool, scales in ((row.k, cache.k, cache.k_scale), (row.v, cache.v, cache.v_scale)):
        x = x[:, block * PAGE : (block + 1) * PAGE]
        stored, scale = stored_form(x, pool.dtype)
        slots = slice(page * PAGE, page * PAGE + x.shape[1])
        pool[:, slots] = stored
        if scales is not None:
            scales[:, slots] = scale


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    stored, scale = stored_form(x, dtype)
    return stored.double() * scale.double().unsqueeze(-1) if dtype == torch.int8 else stored.double()


def rounds_queries(shape: Shape) -> bool:
    """Whether a form serves that multiplies bfloat16: its queries and weights are rounded to it."""
    return native.isa() in ("amx", "avx512_bf16") and shape.dtype != torch.float32


def scaled_queries(q: Tensor, shape: Shape) -> Tensor:
    """`q [tokens, heads, head_dim]` over the root of head_dim, exact or rounded as such a form rounds it."""
    if not rounds_queries(shape):
        return q.double() * shape.head_dim**-0.5
    log2_e = 1 / math.log(2)
    scale = torch.tensor(log2_e / math.sqrt(shape.head_dim), dtype=torch.float32)
    return (q * scale).bfloat16().double() / log2_e


def error_over_bound(out: Tensor, row: History, context: int, shape: Shape, shift: int = 0) -> float:
    """The largest |out - exact|, in units of what roundings of every chain can add up to. `shift` moves the causal
    edge, for the negative control.

    The AMX form rounds weights to bfloat16, by 2^-8 of each at most, and with bfloat16 storage sums them rounded, so
    that it is the distance of each value from the result that is weighted wrongly; its exp2 is right within 2^-13."""
    keys, values = (as_stored(x, shape.dtype).repeat_interleave(shape.groups, 0) for x in (row.k, row.v))
    queries = scaled_queries(row.q[context:], shape).transpose(0, 1)
    num_new, num_keys = queries.shape[1], keys.shape[1]
    seen = torch.ones(num_new, num_keys, dtype=torch.bool).tril(context + shift)
    scores = (queries @ keys.transpose(1, 2)).masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    largest = (queries.abs() @ keys.abs().transpose(1, 2)).amax(-1, keepdim=True)
    exact, magnitude = weights @ values, weights @ values.abs()
    bound = EPSILON * (2 * (shape.head_dim + 8) * largest + 2 * num_keys + 40) * magnitude + 1e-30
    if rounds_queries(shape):
        bound = bound + (2.0**-8 + 2.0**-12) * (magnitude + exact.abs())
    difference = (out.double().transpose(0, 1) - exact).abs()
    assert not difference.isnan().any()
    return float((difference / bound).max())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 130)), min_size=1, max_size=3),
    groups=st.sampled_from([1, 2, 5, 6, 7, 8]),
    head_dim=st.sampled_from([64, 128, 256, 32, 48, 10]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_any_batch_is_within_rounding_of_float64(
    lengths: list[tuple[int, int]], groups: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    shape = Shape(groups, 1 + seed % 2, head_dim, dtype)
    rows = [(sequence(context + new, shape, seed + i), context) for i, (context, new) in enumerate(lengths)]
    for out, (row, context) in zip(attend(rows, shape, seed=seed), rows, strict=True):
        assert error_over_bound(out, row, context, shape) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 96, 48, 6])
@pytest.mark.parametrize(("context", "new"), [(0, 1), (0, 65), (63, 1), (63, 2), (64, 1), (127, 130)])
def test_every_form_is_right_at_the_edges_of_pages(
    isa: str, dtype: torch.dtype, head_dim: int, context: int, new: int
) -> None:
    shape = Shape(groups=5, kv_heads=1, head_dim=head_dim, dtype=dtype)
    row = sequence(context + new, shape)
    (out,) = attend([(row, context)], shape)
    assert error_over_bound(out, row, context, shape) <= 1


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_bound_notices_a_causal_edge_off_by_one(shift: int) -> None:
    """Negative control: one key too few or too many moves the result far past the bound."""
    shape = Shape(dtype=torch.float32)
    row = sequence(200, shape)
    (out,) = attend([(row, 100)], shape)
    assert error_over_bound(out, row, 100, shape) <= 1
    assert error_over_bound(out, row, 100, shape, shift) > 100


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_wider_bound_of_bfloat16_notices_it_too(isa: str, dtype: torch.dtype, shift: int) -> None:
    """Negative control, among few keys: one more is then more than a rounding."""
    shape = Shape(dtype=dtype)
    row = sequence(12, shape)
    (out,) = attend([(row, 4)], shape)
    assert error_over_bound(out, row, 4, shape) <= 1
    assert error_over_bound(out, row, 4, shape, shift) > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("groups", [1, 2, 5, 7, 8])
def test_any_number_of_rows_is_right(isa: str, dtype: torch.dtype, groups: int) -> None:
    """1 to 130 rows of a tile and more, one token further each time."""
    shape = Shape(groups=groups, kv_heads=1, dtype=dtype)
    row = sequence(130 // groups + 70, shape)
    for new in range(1, 130 // groups + 1):
        (out,) = attend([(row.first(70 + new), 70)], shape)
        assert error_over_bound(out, row.first(70 + new), 70, shape) <= 1, new


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 7])
def test_a_row_read_in_steps_has_the_bits_of_one_read_whole(isa: str, dtype: torch.dtype, groups: int) -> None:
    shape = Shape(groups=groups, dtype=dtype)
    row = sequence(230, shape)
    (whole,) = attend([(row, 0)], shape)
    start = 0
    for step in (1, 63, 64, 65, 2, 35):
        (part,) = attend([(row.first(start + step), start)], shape, seed=step)
        assert torch.equal(part, whole[start : start + step]), (start, step)
        start += step
    assert start == 230


@pytest.mark.parametrize("shape", [Shape(), Shape(1, 1, 128, torch.int8), Shape(8, 1, 48, torch.float32)])
def test_a_decoded_token_has_the_bits_of_a_read_one(isa: str, shape: Shape) -> None:
    row = sequence(140, shape)
    (whole,) = attend([(row, 0)], shape)
    for position in range(140):
        (decoded,) = attend([(row.first(position + 1), position)], shape, seed=position)
        assert torch.equal(decoded[0], whole[position]), position


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_has_the_bits_of_one_in_a_crowd(isa: str, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    lengths = [(0, 130), (64, 1), (100, 30), (0, 1), (63, 1), (190, 3), (5, 64)]
    rows = [(sequence(context + new, shape, i), context) for i, (context, new) in enumerate(lengths)]
    alone = [attend([row], shape)[0] for row in rows]
    for order in (rows, rows[::-1]):
        crowd = attend(order, shape, seed=3)
        for out, expected in zip(crowd if order is rows else crowd[::-1], alone, strict=True):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [1, 3, 30])
def test_rows_that_share_pages_have_the_bits_of_rows_alone(isa: str, dtype: torch.dtype, new: int) -> None:
    shape = Shape(dtype=dtype)
    prefix = sequence(3 * PAGE + 20, shape)
    rows = [(forked(prefix, i + new, shape, i + 1), 3 * PAGE + 20 + i) for i in range(5)]
    rows.insert(2, (sequence(2 * PAGE, shape, 9).first(2 * PAGE), 2 * PAGE - 1))  # one that shares nothing
    rows.append((prefix.first(PAGE), PAGE - new))  # one that ends with the first shared page
    alone = [attend([row], shape)[0] for row in rows]
    order = [0, 1, 3, 4, 5, 6, 2]
    shared = attend([rows[i] for i in order[:-1]], shape, shared_pages=3)
    for out, i in zip(shared, order, strict=False):
        assert torch.equal(out, alone[i]), i


def test_rows_that_share_pages_are_planned_together() -> None:
    def num_items(tables: list[list[int]], context: int) -> int:
        num_rows = len(tables)
        plan = AttentionPlan(
            torch.tensor(tables, dtype=torch.int32), torch.arange(num_rows + 1), torch.full((num_rows,), context)
        )
        shape = Shape()
        paged_attention(torch.zeros(num_rows, 14, 64), poisoned_cache(40, shape), plan)
        (planned,) = plan.derived.values()
        return int(planned.num_items)  # type: ignore[attr-defined]

    shared = [[1, 2, 3, 10 + row] for row in range(4)]
    scattered = [[10 + 4 * row + page for page in range(4)] for row in range(4)]
    assert num_items(shared, 200) == 1
    assert num_items(scattered, 200) == 4
    assert num_items([*shared[:2], *scattered[2:], *shared[2:]], 200) == 3


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_with_any_number_of_threads(isa: str, dtype: torch.dtype, threads: int) -> None:
    shape = Shape(dtype=dtype)
    rows = [(sequence(context + new, shape, context), context) for context, new in [(0, 130), (70, 5), (129, 1)]]
    expected = attend(rows, shape)
    native.set_num_threads(threads)
    for out, one in zip(attend(rows, shape), expected, strict=True):
        assert torch.equal(out, one)


@pytest.mark.parametrize("groups", [1, 5, 7])
def test_what_a_later_token_stores_reaches_no_earlier_one(isa: str, groups: int) -> None:
    """Even NaN, in the same page and in the same call."""
    shape = Shape(groups=groups)
    row = sequence(100, shape)
    (expected,) = attend([(row, 0)], shape)
    for position in (1, 70, 99):
        k, v = row.k.clone(), row.v.clone()
        k[:, position] = v[:, position] = float("nan")
        (out,) = attend([(replace(row, k=k, v=v), 0)], shape)
        assert torch.equal(out[:position], expected[:position])
        assert out[position:].isnan().all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -1])
def test_a_nan_key_is_nan_whatever_its_payload(isa: str, bits: int) -> None:
    """A NaN's low bits must not end up in an exponent, where they make a finite weight."""
    shape = Shape(dtype=torch.float32)
    row = sequence(64, shape)
    k = row.k.clone()
    k.view(torch.int32)[:, 0, 3] = bits
    (out,) = attend([(replace(row, k=k), 63)], shape)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_order_of_keys_has_other_bits(isa: str, dtype: torch.dtype) -> None:
    """Negative control of every test of bits above: the same set of keys in another order is close, and not equal."""
    shape = Shape(dtype=dtype)
    row = sequence(64, shape)
    (out,) = attend([(row, 63)], shape)
    (other,) = attend([(History(row.q, row.k.flip(1), row.v.flip(1)), 63)], shape)
    torch.testing.assert_close(out, other, rtol=1e-4, atol=1e-5)
    assert not torch.equal(out, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_rise_from_page_to_page_are_right_in_any_steps(isa: str, dtype: torch.dtype) -> None:
    """Each page's scores dwarf those before it, by far more than an exponent of float32 holds."""
    shape = Shape(groups=5, dtype=dtype)
    row = sequence(200, shape)
    steep = torch.cat([torch.full((64,), 30.0**i) for i in range(4)])[:200]
    row = replace(row, k=row.k * steep.view(1, -1, 1))
    (whole,) = attend([(row, 0)], shape)
    assert whole.isfinite().all()
    for start, end in ((0, 63), (63, 70), (70, 129), (129, 200)):
        (part,) = attend([(row.first(end), start)], shape)
        assert torch.equal(part, whole[start:end])
        assert error_over_bound(part, row.first(end), start, shape) <= 1


def test_scores_far_apart_do_not_overflow(isa: str) -> None:
    shape = Shape(groups=1, kv_heads=1, dtype=torch.float32)
    row = sequence(130, shape)
    row = replace(row, q=row.q * 1000)
    (out,) = attend([(row, 0)], shape)
    exact = torch.softmax(
        (row.q[:, 0].double() @ row.k[0].double().T / 8).masked_fill(~torch.ones(130, 130).tril().bool(), -torch.inf),
        -1,
    )
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, 0].double(), exact @ row.v[0].double(), rtol=1e-2, atol=1e-2)


def test_wrong_operands_are_refused_before_any_work() -> None:
    shape = Shape()
    cache = poisoned_cache(3, shape)
    q = torch.zeros(2, 14, 64)

    def plan(
        tables: Sequence[Sequence[int]] = ((0, 1),), starts: Sequence[int] = (0, 2), context: Sequence[int] = (64,)
    ) -> AttentionPlan:
        return AttentionPlan(torch.tensor(tables, dtype=torch.int32), torch.tensor(starts), torch.tensor(context))

    with pytest.raises(TypeError, match=r"q is .*float64"):
        paged_attention(q.double(), cache, plan())
    with pytest.raises(ValueError, match="need contiguous"):
        paged_attention(q[:, :13], cache, plan())
    with pytest.raises(ValueError, match="q has 2 tokens, the plan's rows have 3"):
        paged_attention(q, cache, plan(starts=[0, 3]))
    with pytest.raises(ValueError, match=r"row 0 .* not in the pool"):
        paged_attention(q, cache, plan([[0, 3]]))
    with pytest.raises(ValueError, match=r"row 0 .* not in the pool"):
        paged_attention(q, cache, plan([[0, -1]]))
    with pytest.raises(ValueError, match=r"row 0 .* more tokens than its block table"):
        paged_attention(q, cache, plan([[0]]))
    with pytest.raises(TypeError, match=r"row_starts is torch.int32"):
        paged_attention(q, cache, replace(plan(), row_starts=torch.tensor([0, 2], dtype=torch.int32)))
    with pytest.raises(ValueError, match="pages are of 32 tokens"):
        paged_attention(q, cache, replace(plan(), page_tokens=32))
    with pytest.raises(ValueError, match="k_scale goes with int8"):
        paged_attention(q, replace(cache, k_scale=torch.ones(2, 192)), plan())
    with pytest.raises(TypeError, match=r"float16"):
        paged_attention(q, LayerCache(cache.k.half(), cache.v.half()), plan())
    assert paged_attention(q[:0], cache, plan(starts=[0, 0])).shape == (0, 14 * 64)
