"""What follows a norm on AMX tiles, where there are any: near float64, and no bit of a row depends on another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from normed_oracle import (
    CHUNK,
    EPSILON,
    FAINT,
    FORMS,
    GATED,
    HALF_BF16,
    INT8_LINEAR,
    INT8_MLP,
    LINEAR,
    MLP,
    MLPS,
    Form,
    Operands,
    as_bf16,
    normed,
    run,
)
from torch import Tensor

from antiphon.kernels import native, native_normed
from antiphon.kernels.ops import Norm

ISAS = native.supported_isas() if native.available() is None else ()


@pytest.fixture(autouse=True)
def amx_and_poisoned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ANTIPHON_CPU_ISA asks for; a result that is not written everywhere has NaN."""
    if native.available() is None and "amx" in native.supported_isas():
        monkeypatch.setenv(native.ISA_VARIABLE, "amx")
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        return empty(*shape, **options) if options else torch.full(shape, float("nan"))

    monkeypatch.setattr(native_normed.torch, "empty", poisoned)
    monkeypatch.setattr(native_normed.torch, "empty_like", lambda like: torch.full(like.shape, float("nan")))


@pytest.mark.amx
@FORMS
@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 70), num_k=st.integers(1, 300), size=st.integers(1, 150), seed=st.integers(0, 9))
def test_any_shape_is_within_rounding_of_float64(form: Form, rows: int, num_k: int, size: int, seed: int) -> None:
    o = form.operands(rows, num_k, size, seed)
    error, bound = form.error_and_bound(form.run(o), o)
    assert (error <= bound).all()


@pytest.mark.amx
@FORMS
@pytest.mark.parametrize(
    "shape",
    # Around tiles, panels of 16, steps of 32 and 64, blocks of 14 and 28 steps, a chunk, and a strip of the packing.
    [
        *[(1, 1, 1), (16, 63, 16), (17, 65, 33), (33, 449, 48), (5, 1793, 257), (255, 64, 31)],
        *[(256, 32, 32), (257, 40, 17), (530, 33, 513), (40, 50, 1900)],
    ],
)
def test_shapes_around_every_block_are_within_rounding_of_float64(form: Form, shape: tuple[int, int, int]) -> None:
    o = form.operands(*shape)
    error, bound = form.error_and_bound(form.run(o), o)
    assert (error <= bound).all()


@pytest.mark.amx
@FORMS
def test_the_noise_is_that_of_the_storage_and_the_comparison_can_fail(form: Form) -> None:
    """On average far below the bound; a row too far, a step of k missing, a norm's weight left out are far above."""
    o = form.operands(50, 896, 1000)
    limit = 0.04 if form.is_int8 else 0.006
    exact = form.exact(o)
    size = (exact - o.x if form.is_mlp else exact).std()

    def noise(other: Operands) -> float:
        return float((form.run(other).double() - exact).square().mean().sqrt() / size)

    assert noise(o) < limit
    first, *rest = o.weights
    assert noise(o.changed(first.roll(1, 0), *rest)) > 5 * limit
    short = first.clone()
    short[:, -64:] = 0
    assert noise(o.changed(short, *rest)) > 2 * limit
    assert noise(replace(o, norm=Norm(torch.full((896,), 2.0), o.norm.eps))) > 2 * limit
    assert noise(replace(o, norm=Norm(o.norm.weight, 1.0))) > 0.02  # eps, where a row's mean square is 1 to 81
    if form.is_mlp:
        gate, up, down = o.weights
        assert noise(o.changed(up, gate, down)) > 5 * limit


@pytest.mark.amx
def test_one_row_of_gate_in_the_wrong_place_is_beyond_the_bound() -> None:
    o = MLP.operands(20, 100, 50)
    wrong = o.weights[0].clone()
    wrong[[30, 31]] = o.weights[0][[31, 30]]
    error, bound = MLP.error_and_bound(MLP.run(o.changed(wrong, *o.weights[1:])), o)
    assert not (error <= bound).all()


def rounded_norm(o: Operands) -> Tensor:
    """What the kernels multiply: with the identity for a weight, the result is the norm itself."""
    return run(native_normed.pack_normed_linear(o.norm, torch.eye(o.x.shape[1]), None), o.x)


@pytest.mark.amx
@pytest.mark.parametrize("num_k", [1, 48, 63, 64, 65, 100, 896])
def test_the_norm_is_rounded_once_and_then_multiplied_as_linear_does(num_k: int) -> None:
    o = LINEAR.operands(70, num_k, 33)
    n, expected = rounded_norm(o), as_bf16(normed(o.x, o.norm))
    assert torch.equal(n, n.bfloat16().float())
    assert ((n.double() - expected.values).abs() <= expected.off).all()
    assert (expected.off > 0).double().mean() < 0.05
    assert torch.equal(LINEAR.run(o), native.pack_linear(o.weights[0], o.bias, "bfloat16")(n))


@pytest.mark.amx
@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_what_is_between_the_products_is_rounded_once_and_then_multiplied_as_linear_does(spread: float) -> None:
    """With the identity for `down`, and x next to nothing, the result is h itself. Gate and up are the native linear's,
    to the bit."""
    o = MLP.operands(70, 48, 48)
    gate_weight, up_weight, down = o.weights[0] * spread, o.weights[1], o.weights[2]
    o = replace(o, x=o.x * FAINT, norm=Norm(o.norm.weight, 0.0))
    y = MLP.run(o.changed(gate_weight, up_weight, torch.eye(48))).double()
    h = (y - o.x.double()).bfloat16().float()
    assert ((h.double() + o.x.double() - y).abs() <= EPSILON * (y.abs() + o.x.abs())).all()
    n = rounded_norm(o)
    gate, up = (native.pack_linear(weight, None, "bfloat16")(n).double() for weight in (gate_weight, up_weight))
    gated = torch.nn.functional.silu(gate) * up
    # Below gates of -88.7 e^-gate is infinite, and h 0; what is far below x is lost in the sum.
    lost = 3e-39 * (gate * up).abs() + 2 * EPSILON * o.x.abs()
    assert ((h.double() - gated).abs() <= (HALF_BF16 + 1.01 * GATED) * gated.abs() + lost).all()
    assert gate.abs().max() < 0.2 if spread < 1 else gate.abs().max() > 5
    y = MLP.run(o.changed(gate_weight, up_weight, down)).float()
    assert torch.equal(y, native.pack_linear(down, None, "bfloat16")(h, o.x))


@pytest.mark.amx
@FORMS
# The last: 2.1 MiB of whole lines, which are stored past the caches where a row alone is not.
@pytest.mark.parametrize("shape", [(7, 100, 50), (70, 950, 40), (300, 96, 17), (600, 896, 48), (600, 40, 896)])
def test_a_row_alone_has_the_bits_it_has_in_a_crowd(form: Form, shape: tuple[int, int, int]) -> None:
    o = form.operands(*shape)
    kernel, rows = form.packed(o), shape[0]
    whole = run(kernel, o.x)
    alone = torch.cat([kernel(o.x[row : row + 1]) for row in range(rows)])
    assert torch.equal(alone, whole)
    for cut in {1, 15, 16, 33, CHUNK, CHUNK + 1, rows - 1}:
        assert torch.equal(torch.cat([kernel(o.x[:cut]), kernel(o.x[cut:])]), whole), cut


@pytest.mark.amx
@FORMS
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_the_number_of_threads_changes_no_bit(form: Form, rows: int) -> None:
    o = form.operands(rows, 200, 600)
    kernel = form.packed(o)
    expected = run(kernel, o.x)
    for threads in (2, 3, 5):
        native.set_num_threads(threads)
        for packed in (kernel, form.packed(o)):
            assert torch.equal(run(packed, o.x), expected), threads


@pytest.mark.amx
@MLPS
def test_x_is_added_last(form: Form) -> None:
    """An x next to nothing has the same norm, and leaves the product as it is."""
    o = form.operands(70, 60, 50)
    kernel = form.packed(replace(o, norm=Norm(o.norm.weight, 0.0)))
    product = run(kernel, o.x * FAINT)
    assert product.abs().min() > 2.0**-20
    assert torch.equal(run(kernel, o.x), product + o.x)


@pytest.mark.amx
@FORMS
def test_rows_of_zeros_stay_zeros_and_bad_values_stay_in_their_row(form: Form) -> None:
    o = form.operands(70, 100, 50)
    kernel = form.packed(o)
    expected = run(kernel, o.x)
    x = o.x.clone()
    bad = {3: float("nan"), 17: float("inf"), 40: float("-inf"), 69: float("nan")}
    for row, value in bad.items():
        x[row, row] = value
    x[5] = 0
    y = run(kernel, x)
    assert not y[list(bad)].isfinite().any()
    assert torch.equal(y[5], x[5] if o.bias is None else o.bias)
    good = torch.tensor([row not in (5, *bad) for row in range(70)])
    assert torch.equal(y[good], expected[good])


@pytest.mark.amx
@MLPS
def test_a_shut_gate_shuts_however_large_the_other_side(form: Form) -> None:
    weights = torch.full((20, 4), -1e30), torch.full((20, 4), 1e30), torch.ones(4, 20)
    x = torch.rand(3, 4) + 0.5
    assert torch.equal(run(form.pack(Norm(torch.ones(4), 1e-6), *weights), x), x)


@pytest.mark.amx
@FORMS
def test_half_precision_and_strided_weights_and_no_rows_are_served(form: Form) -> None:
    o = form.operands(12, 40, 300)  # taller than a strip of the packing
    expected = form.run(o)
    strided = o.changed(*(weight.T.contiguous().T for weight in o.weights))
    every_other = torch.stack([o.norm.weight, torch.zeros(40)], dim=1)[:, 0]
    assert torch.equal(form.run(replace(strided, norm=Norm(every_other, o.norm.eps))), expected)
    for dtype in (torch.bfloat16, torch.float16):
        low = replace(o.changed(*(weight.to(dtype) for weight in o.weights)), norm=narrow(o.norm, dtype))
        wide = replace(o.changed(*(weight.float() for weight in low.weights)), norm=narrow(low.norm, torch.float32))
        assert torch.equal(form.run(low), form.run(wide))
    assert form.packed(o)(o.x[:0]).shape == (0, expected.shape[1])


def narrow(norm: Norm, dtype: torch.dtype) -> Norm:
    return Norm(norm.weight.to(dtype), norm.eps)


@pytest.mark.amx
def test_a_linear_layer_without_a_bias_has_none() -> None:
    for form in (LINEAR, INT8_LINEAR):
        o = form.operands(20, 40, 33)
        without, zeros = replace(o, bias=None), replace(o, bias=torch.zeros(33))
        assert torch.equal(form.run(without), form.run(zeros))
        assert o.bias is not None and torch.equal(form.run(o), form.run(without) + o.bias)


@pytest.mark.amx
def test_the_bytes_are_those_of_whole_panels_and_steps() -> None:
    norm = 4 * 40
    assert MLP.packed(MLP.operands(1, 40, 20)).num_bytes == (2 * 32 * 64 + 64 * 32) * 2 + norm
    assert INT8_MLP.packed(INT8_MLP.operands(1, 40, 20)).num_bytes == 2 * 32 * 64 + 64 * 64 + 4 * (2 * 32 + 40) + norm
    assert LINEAR.packed(LINEAR.operands(1, 40, 50)).num_bytes == 64 * 64 * 2 + 4 * 50 + norm
    assert INT8_LINEAR.packed(INT8_LINEAR.operands(1, 40, 50)).num_bytes == 64 * 64 + 4 * (50 + 50) + norm


@pytest.mark.amx
@FORMS
def test_wrong_operands_are_refused_before_any_work(form: Form) -> None:
    o = form.operands(4, 32, 48)
    kernel = form.packed(o)
    for x in (o.x.double(), o.x.bfloat16(), o.x.to("meta")):
        with pytest.raises(TypeError, match="this kernel takes float32 on the CPU"):
            kernel(x)
    for x in (o.x[:, :31], o.x[0], o.x[None], torch.tensor(1.0), o.x.T.contiguous().T, torch.zeros(8, 32)[::2]):
        with pytest.raises(ValueError, match="need contiguous"):
            kernel(x)


@pytest.mark.amx
@MLPS
def test_weights_of_an_mlp_that_do_not_fit_are_refused(form: Form) -> None:
    o = form.operands(1, 4, 5)
    gate, up, down = o.weights
    for weights in ((gate[:4], up, down), (gate, up[:, :3], down), (gate, up, down[:, :4]), (gate, up, down[:3])):
        with pytest.raises(ValueError, match="do not fit"):
            form.pack(o.norm, *weights)
    with pytest.raises(ValueError, match="2 dimension"):
        form.pack(o.norm, gate, up[0], down)
    with pytest.raises(ValueError, match="neither size may be 0"):
        form.pack(o.norm, gate[:0], up[:0], down[:, :0])
    with pytest.raises(ValueError, match="at most 65536 inputs"):
        form.pack(Norm(torch.ones(1), 0.0), torch.zeros(65537, 1), torch.zeros(65537, 1), torch.zeros(1, 65537))


@pytest.mark.amx
@FORMS
def test_wrong_weights_are_refused(form: Form) -> None:
    o = form.operands(1, 4, 5)
    first, *rest = o.weights
    with pytest.raises(TypeError, match=r"weight is torch\.int8"):
        form.packed(o.changed(first.to(torch.int8), *rest))
    for weight in (torch.ones(3), torch.ones(5), torch.ones(1), torch.ones(1, 4)):
        with pytest.raises(ValueError, match="the norm's weight is"):
            form.packed(replace(o, norm=Norm(weight, 1e-6)))
    if not form.is_mlp:
        with pytest.raises(ValueError, match="bias"):
            form.packed(replace(o, bias=torch.zeros(4)))
    wide = [torch.zeros(1, 65537), torch.zeros(1, 65537), torch.zeros(65537, 1)][: len(o.weights)]
    with pytest.raises(ValueError, match="at most 65536 inputs"):
        form.packed(replace(o.changed(*wide), norm=Norm(torch.ones(65537), 0.0), bias=None))


@pytest.mark.amx
@pytest.mark.parametrize("form", [INT8_LINEAR, INT8_MLP], ids=["int8_linear", "int8_mlp"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_int8_refuses_weights_that_are_not_finite(form: Form, value: float) -> None:
    o = form.operands(1, 40, 20)
    for place in range(len(o.weights)):
        weights = [weight.clone() for weight in o.weights]
        weights[place][-1, -1] = value
        with pytest.raises(ValueError, match="not finite"):
            form.packed(o.changed(*weights))


@FORMS
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx"])
def test_another_instruction_set_is_refused(form: Form, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    with pytest.raises(ValueError, match=f"for amx alone, asked for '{isa}'"):
        form.packed(form.operands(1, 4, 5))
