"""The int8 product: exact sums, so the same bits as plain torch, for every row alone and on any threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels import native, reference_int8
from antiphon.kernels.native_int8 import NativeInt8Linear, pack_int8_linear
from antiphon.kernels.native_layer import LayerOps
from antiphon.kernels.ops import ONE_PLANE, Planes
from antiphon.kernels.reference_int8 import Int8PlainLinear

pytestmark = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))
ISAS = native.supported_isas() if native.available() is None else ()
TWO = Planes(weight=True)
WIDE_ISAS = [isa for isa in ISAS if isa in ("avx2", "portable")]  # the forms with int16 activations

SHAPES = [(1, 1, 1), (1, 2, 16), (2, 3, 17), (5, 96, 15), (6, 31, 33), (7, 64, 16), (13, 130, 47), (23, 513, 65)]
SHAPES += [(6, 1030, 31), (40, 1500, 50), (197, 515, 24), (385, 64, 16)]


@pytest.fixture(autouse=True)
def one_thread_and_wide_activations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`plain` has the levels of the wide forms; tests of another form set it themselves."""
    monkeypatch.setenv(native.ISA_VARIABLE, WIDE_ISAS[0])
    before = native.num_threads()
    native.set_num_threads(1)
    yield
    native.set_num_threads(before)


def operands(rows: int, num_k: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, num_k, generator=generator)
    weight = torch.randn(columns, num_k, generator=generator) * 0.05
    bias, residual = torch.randn(columns, generator=generator), torch.randn(rows, columns, generator=generator)
    return x, weight, bias, residual


def plain(weight: Tensor, bias: Tensor | None) -> Int8PlainLinear:
    layer = reference_int8.linear(weight, bias)
    assert isinstance(layer, Int8PlainLinear)
    return layer


def poisoned(layer: NativeInt8Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], layer.out_features), float("nan"))
    return layer(x, residual, out)


@pytest.mark.parametrize("isa", WIDE_ISAS)
@pytest.mark.parametrize(("rows", "num_k", "columns"), SHAPES)
def test_equals_the_same_quantisation_in_torch_bitwise(
    isa: str, rows: int, num_k: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    x, weight, bias, residual = operands(rows, num_k, columns)
    layer, oracle = pack_int8_linear(weight, bias), plain(weight, bias)
    assert (layer.isa, layer.levels) == (isa, oracle.levels)
    assert torch.equal(poisoned(layer, x), oracle(x))
    assert torch.equal(poisoned(layer, x, residual), oracle(x, residual))
    assert torch.equal(poisoned(pack_int8_linear(weight), x, residual), plain(weight, None)(x, residual))


@pytest.mark.parametrize("isa", WIDE_ISAS)
@pytest.mark.parametrize(("rows", "num_k", "columns"), [(1, 1, 1), (7, 64, 16), (13, 130, 47), (23, 513, 65)])
def test_two_planes_equal_the_same_planes_in_torch_bitwise(
    isa: str, rows: int, num_k: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    x, weight, bias, residual = operands(rows, num_k, columns)
    kept = weight.clone()
    layer, oracle = pack_int8_linear(weight, bias, TWO), reference_int8.linear(weight, bias, TWO)
    assert torch.equal(poisoned(layer, x), oracle(x))
    assert torch.equal(poisoned(layer, x, residual), oracle(x, residual))
    assert torch.equal(weight, kept), "what is packed is left as it was"
    assert layer.num_bytes == 2 * pack_int8_linear(weight).num_bytes + bias.nbytes
    assert num_k == 1 or not torch.equal(layer(x), plain(weight, bias)(x))


@pytest.mark.parametrize("isa", ISAS)
def test_a_second_plane_takes_the_rounding_of_weights_away(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With x of one value a row, which 8 bits hold exactly, only the weights are rounded."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    _, weight, _, _ = operands(1, 896, 300)
    x = torch.eye(896)[:40]
    errors = [
        (pack_int8_linear(weight, planes=planes)(x) - x @ weight.T).std() / weight.std() for planes in (ONE_PLANE, TWO)
    ]
    assert errors[1] < errors[0] / 100
    assert errors[0] > 1e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "num_k", "columns"), [(1, 1, 1), (7, 64, 16), (40, 130, 47), (23, 513, 65)])
def test_a_second_plane_of_the_activations_equals_that_in_torch_bitwise_where_they_have_8_bits(
    isa: str, rows: int, num_k: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    x, weight, bias, residual = operands(rows, num_k, columns)
    x[rows // 2] = 0
    both = Planes(weight=True, activations=True)
    layer, found = pack_int8_linear(weight, bias, both), reference_int8.linear(weight, bias, both)
    assert isinstance(found, Int8PlainLinear) and found.fine is not None
    if layer.levels <= 127:
        found = replace(found, levels=127, fine=replace(found.fine, levels=127))
    assert torch.equal(poisoned(layer, x, residual), found(x, residual))
    exact = x.double() @ weight.double().T + bias
    found_with = [pack_int8_linear(weight, bias, planes)(x).double() for planes in (both, TWO)]
    error, plain_error = ((found - exact).square().mean().sqrt() for found in found_with)
    if layer.levels <= 127 and num_k > 1:
        assert error < plain_error / 20
    else:
        assert error <= 1.001 * plain_error + 1e-7
    x[0, 0] = float("nan")
    assert layer(x)[0].isnan().all() and not layer(x)[1:].isnan().any()


@pytest.mark.parametrize("isa", ISAS)
def test_a_head_of_two_planes_scores_what_its_logits_say(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    x, weight, _, _ = operands(9, 130, 70)
    targets = torch.arange(9) * 7
    for planes, near in ((TWO, True), (ONE_PLANE, False)):
        head = pack_int8_linear(weight, planes=planes)
        found = LayerOps().log_prob(x, head, targets, 65)
        logits = pack_int8_linear(weight, planes=TWO)(x)[:, :65].double()
        exact = (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)).float()
        assert torch.allclose(found, exact, rtol=1e-6, atol=1e-6) == near


def test_the_comparison_with_torch_can_fail() -> None:
    """One weight, one step away, moves its column alone."""
    x, weight, bias, _ = operands(9, 100, 20)
    oracle = plain(weight, bias)
    oracle.weight[3, 50] += 1
    differs = (pack_int8_linear(weight, bias)(x) != oracle(x)).any(0)
    assert differs[3] and not differs[torch.arange(20) != 3].any()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 30),
    num_k=st.integers(1, 700),
    columns=st.integers(1, 70),
    seed=st.integers(0, 9),
    spread=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_any_shape_and_scale_equals_torch(rows: int, num_k: int, columns: int, seed: int, spread: float) -> None:
    x, weight, bias, residual = operands(rows, num_k, columns, seed)
    x, weight = x * spread, weight * spread**-0.5
    assert torch.equal(poisoned(pack_int8_linear(weight, bias), x, residual), plain(weight, bias)(x, residual))


@pytest.mark.parametrize("isa", ISAS)
def test_is_near_the_unquantised_product(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64: the weights' half step, at worst; on average the noise of 8 bits."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    x, weight, bias, _ = operands(50, 896, 300)
    layer = pack_int8_linear(weight, bias)
    exact = x.double() @ weight.double().T + bias
    error = (layer(x).double() - exact).abs()
    weight_step = weight.abs().amax(1).double() / 127
    x_step = x.abs().amax(1, keepdim=True).double() / layer.levels
    bound = x.double().abs().sum(1, keepdim=True) * weight_step / 2 + x_step / 2 * weight.double().abs().sum(1)
    assert (error <= bound * 1.01 + 1e-5).all()
    assert error.square().mean().sqrt() / exact.std() < (0.01 if layer.levels > 127 else 0.02)
    wrong = (poisoned(pack_int8_linear(weight * 1.05, bias), x).double() - exact).abs()
    assert not wrong.square().mean().sqrt() / exact.std() < 0.02


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [6, 7, 12, 200])
def test_a_row_alone_has_the_bits_it_has_in_a_crowd(isa: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    x, weight, bias, residual = operands(rows, 1100, 40)
    layer = pack_int8_linear(weight, bias)
    whole = poisoned(layer, x, residual)
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(poisoned(layer, x[row : row + 1], residual[row : row + 1])[0], whole[row])
    for cut in (1, 5, rows - 1):
        parts = [poisoned(layer, x[:cut], residual[:cut]), poisoned(layer, x[cut:], residual[cut:])]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("isa", ISAS)
def test_the_number_of_threads_changes_no_bit(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    for rows in (3, 30, 400):
        x, weight, bias, residual = operands(rows, 600, 400)
        layer = pack_int8_linear(weight, bias)
        expected = poisoned(layer, x, residual)
        for threads in (2, 3):
            native.set_num_threads(threads)
            assert torch.equal(poisoned(layer, x, residual), expected), (rows, threads)
            assert torch.equal(poisoned(pack_int8_linear(weight, bias), x, residual), expected), (rows, threads)
        native.set_num_threads(1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_k", [4864, 65536])
def test_the_largest_sums_do_not_overflow(isa: str, num_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight and every activation at its largest, of both signs, and one row that is all noise."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    weight = torch.ones(17, num_k)
    weight[1] = -1
    x = torch.ones(8, num_k)
    x[1] = -3
    x[2] = torch.randn(num_k, generator=torch.Generator().manual_seed(0))
    layer = pack_int8_linear(weight)
    assert 127 <= layer.levels <= (2**31 - 1) // (127 * num_k)
    if isa in WIDE_ISAS:
        assert torch.equal(layer(x), plain(weight, None)(x))
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(layer(x)[[0, 1]].double(), exact[[0, 1]], rtol=1e-6, atol=0)
    torch.testing.assert_close(layer(x)[2].double(), exact[2], rtol=0, atol=8 * num_k**0.5 / layer.levels)


def test_the_usual_weights_leave_many_levels() -> None:
    """What the weight itself allows, not what its size alone would: about four times as many."""
    for num_k in (896, 4864, 8960):
        _, weight, _, _ = operands(1, num_k, 64)
        layer = pack_int8_linear(weight)
        assert layer.levels >= min(32767, 3 * (2**31 - 1) // (127 * num_k))


@pytest.mark.parametrize("isa", ISAS)
def test_zero_rows_give_the_bias_and_bad_values_stay_in_their_row(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    for rows in (5, 20):
        x, weight, bias, residual = operands(rows, 300, 40)
        weight[9] = 0
        layer = pack_int8_linear(weight, bias)
        expected = layer(x)
        assert torch.equal(expected[:, 9], bias[9].expand(rows))
        bad = {1: float("nan"), 2: float("inf"), 3: float("-inf")}
        for row, value in bad.items():
            x[row, 100 * row - 1] = value
        x[4], x[0] = 0.0, 1e-38
        y = poisoned(layer, x, residual)
        assert y[list(bad)].isnan().all()
        assert torch.equal(y[[0, 4]], bias + residual[[0, 4]])
        assert torch.equal(y[5:], expected[5:] + residual[5:])


def test_half_precision_strided_and_leading_sizes_are_served() -> None:
    x, weight, bias, residual = operands(12, 40, 24)
    layer = pack_int8_linear(weight, bias)
    expected = layer(x, residual)
    assert torch.equal(pack_int8_linear(weight.T.contiguous().T, bias)(x, residual), expected)
    assert torch.equal(layer(x.T.contiguous().T, residual.T.contiguous().T), expected)
    assert torch.equal(layer(x.view(3, 4, 40), residual.view(3, 4, 24)), expected.view(3, 4, 24))
    assert layer(x[:0]).shape == (0, 24)
    for dtype in (torch.bfloat16, torch.float16):
        low = weight.to(dtype)
        assert torch.equal(pack_int8_linear(low, bias)(x), pack_int8_linear(low.float(), bias)(x))
    in_place = residual.clone()
    layer(x, in_place, in_place)
    assert torch.equal(in_place, expected)


def test_weights_between_two_steps_of_any_size_are_quantised_as_in_torch() -> None:
    """Halves are rounded to even; a row too small to have a scale is zeros."""
    weight = torch.cat([torch.arange(-127, 127) + 0.5, torch.tensor([127.0])]).repeat(4, 1)
    weight *= torch.tensor([1.0, -1e-36, 1e-40, 1e36])[:, None]
    assert torch.equal(pack_int8_linear(weight)(torch.eye(255)), plain(weight, None)(torch.eye(255)))


def test_a_packed_weight_has_a_byte_for_each_weight() -> None:
    layer = pack_int8_linear(torch.randn(64, 256), torch.randn(64))
    assert layer.num_bytes == 64 * 256 + 64 * 4 + 64 * 4


def test_a_weight_taller_than_a_strip_is_packed_whole() -> None:
    x, weight, _, _ = operands(3, 20, 1300)
    assert torch.equal(pack_int8_linear(weight)(x), plain(weight, None)(x))


def test_wrong_operands_are_refused_before_any_work() -> None:
    x, weight, bias, residual = operands(4, 32, 48)
    layer = pack_int8_linear(weight, bias)
    out = torch.full((4, 48), 7.0)
    for wrong in (x.double(), x.bfloat16()):
        with pytest.raises(TypeError, match="float32"):
            layer(wrong, None, out)
    with pytest.raises(TypeError, match="residual is"):
        layer(x, residual.double(), out)
    for arguments in ((x[:, :31], None, out), (x, residual[:3], out), (x, residual[:, :47], out), (x, None, out[:3])):
        with pytest.raises(ValueError, match="it must be"):
            layer(*arguments)
    with pytest.raises(ValueError, match="contiguous"):
        layer(x, None, torch.empty(48, 4).T)
    assert (out == 7.0).all()


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(TypeError, match=r"weight is torch\.int8"):
        pack_int8_linear(torch.zeros(4, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match="2 dimension"):
        pack_int8_linear(torch.zeros(4))
    with pytest.raises(ValueError, match="neither size may be 0"):
        pack_int8_linear(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="at most 65536 inputs"):
        pack_int8_linear(torch.zeros(1, 65537))
    with pytest.raises(ValueError, match=r"needs \(4,\)"):
        pack_int8_linear(torch.zeros(4, 4), torch.zeros(5))
    with pytest.raises(ValueError, match="not finite"):
        pack_int8_linear(torch.tensor([[1.0, float("inf")]]))
