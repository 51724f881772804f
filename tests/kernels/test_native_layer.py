"""The native kernels of a layer: right against float64, the same bits whatever stands beside a row, clear refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels import native, native_int8, reference
from antiphon.kernels.native_layer import LayerOps

ISAS = ("avx2", "portable")
SIZES = (1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 128, 896, 1001)
NAN = float("nan")
INF = float("inf")


def made(isa: str, monkeypatch: pytest.MonkeyPatch) -> LayerOps:
    """The kernels of one instruction set; one that this machine lacks has nothing to check here."""
    assert native.available() is None, native.available()
    monkeypatch.setenv(native.ISA_VARIABLE, isa if isa in native.supported_isas() else "portable")
    return LayerOps()


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerOps:
    return made(request.param, monkeypatch)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """A lone row is computed by the caller and a crowd by two threads, so that equal bits are equal on 1 and 2."""
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are made with NaN in them, so that an element that is not written shows."""
    new_empty = Tensor.new_empty

    def poisoned(tensor: Tensor, *sizes: int) -> Tensor:
        return new_empty(tensor, *sizes).fill_(NAN)

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def exact_silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def within(y: Tensor, exact: Tensor, units: float) -> bool:
    """Whether no element is further from `exact` than `units` times float32's spacing at it."""
    return bool(((y.double() - exact).abs() <= exact.abs() * (units * 2.0**-23) + 2.0**-149).all())


# ---- rms_norm


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_of_any_size_is_within_three_units_of_float64(ops: LayerOps, size: int) -> None:
    x, weight = normal(5, size), normal(size, seed=1)
    assert within(ops.rms_norm(x, weight, 1e-6), exact_rms_norm(x, weight, 1e-6), 3)


def test_a_norm_can_miss_its_bound() -> None:
    """Negative control: one element left out of the sum of squares, or another eps, is past the bound."""
    x, weight = normal(5, 896), torch.ones(896)
    y = LayerOps().rms_norm(x, weight, 1e-6)
    shorter = x.clone()
    shorter[:, -1] = 0
    assert not within(y[:, :-1], exact_rms_norm(shorter, weight, 1e-6)[:, :-1], 3)
    assert not within(y, exact_rms_norm(x, weight, 1e-5), 3)


def test_a_norm_of_heads_in_a_fused_matrix_equals_that_of_their_copy(ops: LayerOps) -> None:
    fused, weight = normal(300, 3 * 64 + 2 * 64), normal(64, seed=1)
    for view in (
        fused[:, :192].view(300, 3, 64),
        fused[:, 192:256].view(300, 1, 64),
        fused[:, 64:128],
        fused[::3, 5:69],
    ):
        assert not view.is_contiguous()
        y = ops.rms_norm(view, weight, 1e-6)
        assert y.is_contiguous()
        assert torch.equal(y, ops.rms_norm(view.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("size", [33, 896])
def test_a_norm_has_the_same_bits_alone_and_in_a_crowd(ops: LayerOps, size: int) -> None:
    x, weight = normal(200, size), normal(size, seed=1)
    alone = torch.cat([ops.rms_norm(x[i : i + 1], weight, 1e-6) for i in range(200)])
    for first, last in ((0, 200), (0, 77), (113, 200)):
        assert torch.equal(ops.rms_norm(x[first:last], weight, 1e-6), alone[first:last])


def test_a_norm_summed_in_another_order_has_other_bits(ops: LayerOps) -> None:
    """Negative control: the equality above can fail."""
    x, weight = normal(200, 896), normal(896, seed=1)
    order = torch.randperm(896, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(ops.rms_norm(x[:, order], weight[order], 1e-6), ops.rms_norm(x, weight, 1e-6)[:, order])


def test_a_norm_of_large_small_and_no_values(ops: LayerOps) -> None:
    weight = torch.ones(40)
    assert torch.equal(ops.rms_norm(torch.zeros(2, 40), weight, 1e-6), torch.zeros(2, 40))
    x = torch.full((1, 40), 1e18)
    assert within(ops.rms_norm(x, weight, 1e-6), torch.ones(1, 40, dtype=torch.float64), 3)
    assert ops.rms_norm(torch.empty(0, 40), weight, 1e-6).shape == (0, 40)
    x = normal(3, 40)
    x[1, 39] = NAN
    y = ops.rms_norm(x, weight, 1e-6)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


# ---- silu_and_mul


@pytest.mark.parametrize("size", SIZES)
def test_a_gated_activation_of_any_size_is_within_four_units_of_float64(ops: LayerOps, size: int) -> None:
    gate_up = 4 * normal(5, 2 * size)
    assert within(ops.silu_and_mul(gate_up), exact_silu_and_mul(gate_up), 4)


def test_a_gated_activation_can_miss_its_bound() -> None:
    """Negative control: gate and up taken for each other."""
    gate_up = normal(5, 64)
    assert not within(LayerOps().silu_and_mul(gate_up.roll(32, 1)), exact_silu_and_mul(gate_up), 4)


@pytest.mark.parametrize("size", [13, 1000])
def test_a_gated_activation_has_the_same_bits_alone_and_in_a_crowd(ops: LayerOps, size: int) -> None:
    gate_up = normal(150, 2 * size)
    alone = torch.cat([ops.silu_and_mul(gate_up[i : i + 1]) for i in range(150)])
    assert torch.equal(ops.silu_and_mul(gate_up), alone)
    assert torch.equal(ops.silu_and_mul(gate_up[31:]), alone[31:])


def test_a_gated_activation_over_all_of_float32(ops: LayerOps) -> None:
    """The exponential's whole range, infinities and NaN. Below -88.7 e^-gate is infinite and the result 0."""
    gate = torch.cat([torch.linspace(-120, 120, 20_001), torch.tensor([INF, NAN, 0.0, -0.0, 1e-40, 3e38, -3e38])])
    y = ops.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(
        y, torch.nn.functional.silu(gate.double()).float(), rtol=5e-7, atol=3e-37, equal_nan=True
    )


# ---- embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 8, 13, 896])
def test_an_embedding_is_exact(ops: LayerOps, dtype: torch.dtype, size: int) -> None:
    table = normal(50, size).to(dtype)
    table[3, 0] = INF
    ids = torch.tensor([49, 0, 3, 3, 17] * 20)
    assert torch.equal(ops.embedding(table, ids), table[ids].float())
    assert ops.embedding(table, ids[:0]).shape == (0, size)


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_an_id_outside_the_table_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="not a row of the table, which has 50"):
        LayerOps().embedding(normal(50, 8), torch.tensor([0, wrong]))


# ---- log_prob


def exact_log_prob(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    logits = (hidden.double() @ weight.double().T)[:, :vocab_size]
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab_size", [1, 15, 1000, 1023, 1024, 1025, 2049, 3000])
def test_a_log_probability_is_within_rounding_of_float64(
    ops: LayerOps, storage: native.Storage, vocab_size: int
) -> None:
    hidden, weight = normal(9, 70), normal(3000, 70, seed=1)
    targets = torch.arange(9) * 331 % vocab_size
    targets[0] = vocab_size - 1
    head = native.pack_linear(weight, storage=storage)
    exact = exact_log_prob(hidden, weight.to(getattr(torch, storage)), targets, vocab_size)
    got = ops.log_prob(hidden, head, targets, vocab_size)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got, reference.log_prob(hidden, head, targets, vocab_size), rtol=1e-6, atol=1e-5)


def test_a_log_probability_counts_the_first_columns_alone() -> None:
    """Negative control: one column more, or another target, moves the result past the tolerance."""
    hidden, weight = 0.1 * normal(9, 70), normal(3000, 70, seed=1)
    targets = torch.arange(9)
    got = LayerOps().log_prob(hidden, native.pack_linear(weight), targets, 2999)
    for other in (exact_log_prob(hidden, weight, targets, 2990), exact_log_prob(hidden, weight, targets + 1, 2999)):
        assert not torch.allclose(got.double(), other, rtol=1e-6, atol=1e-5)


def test_a_log_probability_has_the_same_bits_alone_and_in_a_crowd(ops: LayerOps) -> None:
    """More rows than a task takes (144) and than a pass takes (1,152)."""
    hidden, weight, bias = normal(1200, 20), normal(1100, 20, seed=1), normal(1100, seed=2)
    targets = torch.randint(0, 1100, (1200,), generator=torch.Generator().manual_seed(3))
    head = native.pack_linear(weight, bias)
    alone = torch.cat([ops.log_prob(hidden[i : i + 1], head, targets[i : i + 1], 1100) for i in range(1200)])
    for first, last in ((0, 1200), (0, 7), (500, 650), (1100, 1200)):
        assert torch.equal(ops.log_prob(hidden[first:last], head, targets[first:last], 1100), alone[first:last])


def test_extreme_logits_give_what_torch_gives(ops: LayerOps) -> None:
    """The head's bias makes every row's logits: whole strips of -inf, infinities, NaN, and values far apart."""
    for special, at in (
        (-INF, slice(0, 1024)),
        (-INF, slice(1024, 2048)),
        (INF, 5),
        (INF, 1500),
        (NAN, 1500),
        (-900.0, 3),
    ):
        bias = torch.full((2100,), -800.0)
        bias[at] = special
        head = native.pack_linear(torch.zeros(2100, 1), bias)
        targets = torch.tensor([0, 5, 1500, 2099])
        expected = torch.log_softmax(bias.double(), 0)[targets].float() if special != INF else torch.full((4,), -INF)
        if special == INF:
            expected[targets == at] = NAN
        got = ops.log_prob(torch.ones(4, 1), head, targets, 2100)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [1000, 1025, 3000])
def test_an_int8_head_gives_what_its_own_logits_give(ops: LayerOps, vocab_size: int) -> None:
    hidden, targets = normal(170, 70), torch.arange(170) * 7 % vocab_size
    head = native_int8.pack_int8_linear(normal(3000, 70, seed=1), normal(3000, seed=2))
    got = ops.log_prob(hidden, head, targets, vocab_size)
    exact = torch.log_softmax(head(hidden)[:, :vocab_size].double(), dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(ops.log_prob(hidden[9:10], head, targets[9:10], vocab_size), got[9:10])


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    head = native.pack_linear(normal(30, 8))
    for wrong in (-1, 20, 29):
        with pytest.raises(ValueError, match="not among the 20 columns"):
            LayerOps().log_prob(normal(2, 8), head, torch.tensor([3, wrong]), 20)
    assert LayerOps().log_prob(normal(0, 8), head, torch.zeros(0, dtype=torch.int64), 20).shape == (0,)


# ---- peak


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, INF, -INF, NAN]), max_size=80),
    padding=st.sampled_from([0, 1, 1000, 1024, 2048]),
    masked=st.booleans(),
    data=st.data(),
)
def test_the_peak_is_the_lowest_index_of_the_largest(
    isa: str, values: list[float], padding: int, masked: bool, data: st.DataObject
) -> None:
    values = [-3.0] * padding + values
    allowed = [True] * len(values)
    if masked:
        allowed = [True] * padding + data.draw(
            st.lists(st.booleans(), min_size=len(values) - padding, max_size=len(values) - padding)
        )
    with pytest.MonkeyPatch.context() as patch:
        ops = made(isa, patch)
    operands = torch.tensor(values), torch.tensor(allowed, dtype=torch.bool) if masked else None
    got = ops.peak(*operands)
    assert got == reference.peak(*operands)
    seen = [value for value, flag in zip(values, allowed, strict=True) if flag and not math.isnan(value)]
    largest = max(seen, default=-INF)
    places = [i for i, value in enumerate(values) if allowed[i] and value == largest and largest > -INF]
    assert got == (largest, places[0] if places else -1, any(math.isnan(value) for value in values))


# ---- refusals


def test_wrong_operands_are_refused_before_any_work() -> None:
    ops = LayerOps()
    x, weight = normal(4, 32), normal(32)
    for wrong_x, wrong_weight in ((x.double(), weight), (x, weight.bfloat16())):
        with pytest.raises(TypeError, match="rms_norm takes float32"):
            ops.rms_norm(wrong_x, wrong_weight, 1e-6)
    for wrong_x, wrong_weight in (
        (x, weight[:31]),
        (x, weight[None]),
        (x, normal(64)[::2]),
        (torch.tensor(1.0), weight),
    ):
        with pytest.raises(ValueError, match="weight is"):
            ops.rms_norm(wrong_x, wrong_weight, 1e-6)
    for wrong_x in (normal(32, 4).T, normal(4, 64)[:, ::2], normal(2, 2, 2, 64)[..., :32]):
        with pytest.raises(ValueError, match="x is"):
            ops.rms_norm(wrong_x, weight, 1e-6)
    with pytest.raises(TypeError, match="silu_and_mul takes float32"):
        ops.silu_and_mul(x.bfloat16())
    for wrong_x in (x[:, :31], x[:, :16], x[0], x.T):
        with pytest.raises(ValueError, match="gate_up is"):
            ops.silu_and_mul(wrong_x)
    with pytest.raises(TypeError, match="table is"):
        ops.embedding(x.half(), torch.tensor([0]))
    with pytest.raises(TypeError, match="token_ids"):
        ops.embedding(x, torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ValueError, match="table is"):
        ops.embedding(x.T, torch.tensor([0]))
    head = native.pack_linear(normal(30, 32))
    with pytest.raises(TypeError, match="log_prob takes float32"):
        ops.log_prob(x.double(), head, torch.zeros(4, dtype=torch.int64), 30)
    with pytest.raises(ValueError, match=r"targets \(3,\)"):
        ops.log_prob(x, head, torch.zeros(3, dtype=torch.int64), 30)
    for wrong in (0, 31):
        with pytest.raises(ValueError, match="the head has 30 columns"):
            ops.log_prob(x, head, torch.zeros(4, dtype=torch.int64), wrong)
    with pytest.raises(TypeError, match="bool"):
        ops.peak(weight, torch.zeros(32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="allowed is"):
        ops.peak(weight, torch.zeros(31, dtype=torch.bool))
