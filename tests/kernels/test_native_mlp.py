"""The gated MLP on AMX tiles, on a processor that has them: near float64, and no bit of a row depends on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels import native, native_mlp
from antiphon.kernels.native_mlp import NativeGatedMlp, pack_gated_mlp, pack_int8_gated_mlp

Pack = Callable[[Tensor, Tensor, Tensor], NativeGatedMlp]
ISAS = native.supported_isas() if native.available() is None else ()
PACKS = pytest.mark.parametrize("pack", [pack_gated_mlp, pack_int8_gated_mlp])

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative
HALF_BF16 = 2.0**-8  # of bfloat16: 8 significant bits
GATED = 2e-4  # of the gated activation before it is rounded (csrc/cpu/amx_mlp.h)
SILU_SLOPE = 1.1  # the steepest of silu
INT8_LEVELS = 127
CHUNK = 256  # rows between the two products


@pytest.fixture(autouse=True)
def amx_and_poisoned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ANTIPHON_CPU_ISA asks for; a result that is not written everywhere has NaN."""
    if native.available() is None and "amx" in native.supported_isas():
        monkeypatch.setenv(native.ISA_VARIABLE, "amx")
    monkeypatch.setattr(native_mlp.torch, "empty_like", lambda like: torch.full(like.shape, float("nan")))


@dataclass(frozen=True)
class Operands:
    gate: Tensor
    up: Tensor
    down: Tensor
    x: Tensor
    residual: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down


def operands(rows: int, num_k: int, size: int, columns: int, seed: int = 0) -> Operands:
    """Gates and ups of about 2, results of about 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = normal(size, num_k) * num_k**-0.5, normal(size, num_k) * num_k**-0.5, normal(columns, size) * size**-0.5
    return Operands(*weights, 2 * normal(rows, num_k), normal(rows, columns))


def run(mlp: NativeGatedMlp, x: Tensor, residual: Tensor) -> Tensor:
    """After rows of NaN, more than these, have gone through the workspaces."""
    mlp(torch.full((x.shape[0] + 20, mlp.in_features), float("nan")), torch.zeros(x.shape[0] + 20, mlp.out_features))
    return mlp(x, residual)


def exact(o: Operands) -> Tensor:
    gate, up = o.x.double() @ o.gate.double().T, o.x.double() @ o.up.double().T
    return (torch.nn.functional.silu(gate) * up) @ o.down.double().T + o.residual.double()


@dataclass(frozen=True)
class Rounded:
    """What a product is computed with: its operands' values and by how much each may be off, in float64."""

    values: Tensor
    off: Tensor

    def __matmul__(self, weight: Rounded) -> Rounded:
        """The product with `weight.T`, and by how much the computed one may be off, at worst: by what its operands are,
        and by one rounding for each step of the longest chain of float32 sums (an int8 sum has three)."""
        size, weight_size = self.values.abs() + self.off, weight.values.abs() + weight.off
        off = size @ weight_size.T - self.values.abs() @ weight.values.abs().T
        chain = 16 + 2 + -(-self.values.shape[1] // 32) + 1
        return Rounded(self.values @ weight.values.T, off + 1.01 * chain * EPSILON * (size @ weight_size.T))


def as_bf16(values: Tensor) -> Rounded:
    """Rounded for good: what the kernel has is known."""
    return Rounded(values.bfloat16().double(), torch.zeros_like(values, dtype=torch.float64))


def as_int8(values: Tensor, off: Tensor | None = None) -> Rounded:
    """Half a step of each row, of which the largest is 127."""
    values = values.double()
    off = torch.zeros_like(values) if off is None else off
    step = (values.abs() + off).amax(1, keepdim=True) / INT8_LEVELS
    return Rounded(values, off + 1.001 * step / 2)


def error_and_bound(y: Tensor, o: Operands, pack: Pack) -> tuple[Tensor, Tensor]:
    """|y - exact| and a bound that holds for any values. bfloat16: against the rounded x and weights."""
    is_int8 = pack is pack_int8_gated_mlp
    x, gate, up, down = (as_int8(v) if is_int8 else as_bf16(v) for v in (o.x, *o.weights))
    gates, ups = x @ gate, x @ up
    h = torch.nn.functional.silu(gates.values) * ups.values
    silu_off = SILU_SLOPE * gates.off
    h_off = silu_off * (ups.values.abs() + ups.off) + torch.nn.functional.silu(gates.values).abs() * ups.off
    h_off = h_off + (h.abs() + h_off) * (GATED + HALF_BF16)
    product = (as_int8(h, h_off) if is_int8 else Rounded(h, h_off)) @ down
    found = product.values + o.residual.double()
    return (y.double() - found).abs(), product.off + EPSILON * (found.abs() + product.off) + 1e-30


@pytest.mark.amx
@PACKS
@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 70),
    num_k=st.integers(1, 300),
    size=st.integers(1, 150),
    columns=st.integers(1, 100),
    seed=st.integers(0, 9),
)
def test_any_shape_is_within_rounding_of_float64(
    pack: Pack, rows: int, num_k: int, size: int, columns: int, seed: int
) -> None:
    o = operands(rows, num_k, size, columns, seed)
    error, bound = error_and_bound(run(pack(*o.weights), o.x, o.residual), o, pack)
    assert (error <= bound).all()


@pytest.mark.amx
@PACKS
@pytest.mark.parametrize(
    "shape",
    # Around tiles, panels of 16, steps of 32 and 64, blocks of 14 and 28 steps, a chunk, and a strip of the packing.
    [
        *[(1, 1, 1, 1), (16, 63, 16, 32), (17, 65, 33, 31), (33, 449, 48, 64), (5, 1793, 257, 33), (255, 64, 31, 16)],
        *[(256, 32, 32, 17), (257, 40, 17, 48), (530, 33, 513, 5), (40, 50, 1900, 20)],
    ],
)
def test_shapes_around_every_block_are_within_rounding_of_float64(pack: Pack, shape: tuple[int, int, int, int]) -> None:
    o = operands(*shape)
    error, bound = error_and_bound(run(pack(*o.weights), o.x, o.residual), o, pack)
    assert (error <= bound).all()


@pytest.mark.amx
@PACKS
def test_the_noise_is_that_of_the_storage_and_the_comparison_can_fail(pack: Pack) -> None:
    """On average far below the bound; a gate for an up, gates one row too far, a step of k missing are far above."""
    o = operands(50, 896, 1000, 300)
    limit = 0.006 if pack is pack_gated_mlp else 0.04
    size = (exact(o) - o.residual).std()

    def noise(*weights: Tensor) -> float:
        y = run(pack(*weights), o.x, o.residual).double()
        return float((y - exact(o)).square().mean().sqrt() / size)

    assert noise(*o.weights) < limit
    assert noise(o.up, o.gate, o.down) > 5 * limit
    assert noise(o.gate.roll(1, 0), o.up, o.down) > 5 * limit
    short = o.gate.clone()
    short[:, -64:] = 0
    assert noise(short, o.up, o.down) > 2 * limit


@pytest.mark.amx
def test_one_row_of_gate_in_the_wrong_place_is_beyond_the_bound() -> None:
    o = operands(20, 100, 50, 33)
    wrong = o.gate.clone()
    wrong[[30, 31]] = o.gate[[31, 30]]
    error, bound = error_and_bound(run(pack_gated_mlp(wrong, o.up, o.down), o.x, o.residual), o, pack_gated_mlp)
    assert not (error <= bound).all()


@pytest.mark.amx
@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_what_is_between_the_products_is_rounded_once_and_then_multiplied_as_linear_does(spread: float) -> None:
    """With the identity for `down` the result is h itself. Gate and up are the native linear's, to the bit."""
    o = operands(70, 100, 48, 33)
    h = run(pack_gated_mlp(o.gate * spread, o.up, torch.eye(48)), o.x, torch.zeros(70, 48))
    gate = native.pack_linear(o.gate * spread, None, "bfloat16")(o.x).double()
    up = native.pack_linear(o.up, None, "bfloat16")(o.x).double()
    gated = torch.nn.functional.silu(gate) * up
    assert torch.equal(h, h.bfloat16().float())
    lost = 3e-39 * (gate * up).abs() + 1.2e-38  # below gates of -88.7, where e^-gate is infinite; subnormal numbers
    assert ((h.double() - gated).abs() <= (HALF_BF16 + 1.01 * GATED) * gated.abs() + lost).all()
    assert gate.abs().max() < 0.2 if spread < 1 else gate.abs().max() > 5
    y = run(pack_gated_mlp(o.gate * spread, o.up, o.down), o.x, o.residual)
    assert torch.equal(y, native.pack_linear(o.down, None, "bfloat16")(h, o.residual))


@pytest.mark.amx
@PACKS
# The last: 2.1 MiB of whole lines, which are stored past the caches where a row alone is not.
@pytest.mark.parametrize("shape", [(7, 100, 50, 33), (70, 950, 40, 17), (300, 96, 17, 40), (600, 40, 48, 896)])
def test_a_row_alone_has_the_bits_it_has_in_a_crowd(pack: Pack, shape: tuple[int, int, int, int]) -> None:
    o = operands(*shape)
    mlp, rows = pack(*o.weights), shape[0]
    whole = run(mlp, o.x, o.residual)
    alone = torch.cat([mlp(o.x[row : row + 1], o.residual[row : row + 1]) for row in range(rows)])
    assert torch.equal(alone, whole)
    for cut in {1, 15, 16, 33, CHUNK, CHUNK + 1, rows - 1}:
        parts = [mlp(o.x[:cut], o.residual[:cut]), mlp(o.x[cut:], o.residual[cut:])]
        assert torch.equal(torch.cat(parts), whole), cut


@pytest.mark.amx
@PACKS
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_the_number_of_threads_changes_no_bit(pack: Pack, rows: int) -> None:
    o = operands(rows, 200, 600, 300)
    mlp = pack(*o.weights)
    expected = run(mlp, o.x, o.residual)
    for threads in (2, 3, 5):
        native.set_num_threads(threads)
        for packed in (mlp, pack(*o.weights)):
            assert torch.equal(run(packed, o.x, o.residual), expected), threads


@pytest.mark.amx
@PACKS
def test_the_residual_is_added_last(pack: Pack) -> None:
    o = operands(70, 60, 50, 48)
    mlp = pack(*o.weights)
    assert torch.equal(run(mlp, o.x, o.residual), run(mlp, o.x, torch.zeros_like(o.residual)) + o.residual)


@pytest.mark.amx
@PACKS
def test_zero_rows_give_the_residual_and_bad_values_stay_in_their_row(pack: Pack) -> None:
    o = operands(70, 100, 50, 33)
    mlp = pack(*o.weights)
    expected = run(mlp, o.x, o.residual)
    x = o.x.clone()
    bad = {3: float("nan"), 17: float("inf"), 40: float("-inf"), 69: float("nan")}
    for row, value in bad.items():
        x[row, row] = value
    x[5] = 0
    y = run(mlp, x, o.residual)
    assert not y[list(bad)].isfinite().any()
    assert torch.equal(y[5], o.residual[5])
    good = torch.tensor([row not in (5, *bad) for row in range(70)])
    assert torch.equal(y[good], expected[good])


@pytest.mark.amx
@PACKS
def test_a_shut_gate_shuts_however_large_the_other_side(pack: Pack) -> None:
    weights = torch.full((20, 1), -1e30), torch.full((20, 1), 1e30), torch.ones(4, 20)
    residual = torch.randn(3, 4)
    assert torch.equal(run(pack(*weights), torch.ones(3, 1), residual), residual)


@pytest.mark.amx
@PACKS
def test_half_precision_and_strided_weights_and_no_rows_are_served(pack: Pack) -> None:
    o = operands(12, 40, 300, 24)  # taller than a strip of the packing
    expected = run(pack(*o.weights), o.x, o.residual)
    strided = [weight.T.contiguous().T for weight in o.weights]
    assert torch.equal(run(pack(*strided), o.x, o.residual), expected)
    for dtype in (torch.bfloat16, torch.float16):
        low = [weight.to(dtype) for weight in o.weights]
        widened = [weight.float() for weight in low]
        assert torch.equal(run(pack(*low), o.x, o.residual), run(pack(*widened), o.x, o.residual))
    assert pack(*o.weights)(o.x[:0], o.residual[:0]).shape == (0, 24)


@pytest.mark.amx
def test_the_bytes_are_those_of_whole_panels_and_steps() -> None:
    o = operands(1, 40, 20, 50)
    assert pack_gated_mlp(*o.weights).num_bytes == (2 * 32 * 64 + 64 * 32) * 2
    assert pack_int8_gated_mlp(*o.weights).num_bytes == (2 * 32 * 64 + 64 * 64) + 4 * (2 * 32 + 50)


@pytest.mark.amx
@PACKS
def test_wrong_operands_are_refused_before_any_work(pack: Pack) -> None:
    o = operands(4, 32, 48, 24)
    mlp = pack(*o.weights)
    for x, residual in ((o.x.double(), o.residual), (o.x.bfloat16(), o.residual), (o.x, o.residual.double())):
        with pytest.raises(TypeError, match="this kernel takes float32 on the CPU"):
            mlp(x, residual)
    wrong = [(o.x[:, :31], o.residual), (o.x, o.residual[:3]), (o.x, o.residual[:, :23]), (o.x[0], o.residual)]
    wrong += [(o.x[None], o.residual), (torch.tensor(1.0), o.residual), (o.x.T.contiguous().T, o.residual)]
    wrong += [(o.x, o.residual.T.contiguous().T), (torch.zeros(8, 32)[::2], o.residual)]
    for x, residual in wrong:
        with pytest.raises(ValueError, match="need contiguous"):
            mlp(x, residual)


@pytest.mark.amx
@PACKS
def test_wrong_weights_are_refused(pack: Pack) -> None:
    o = operands(1, 4, 5, 3)
    for weights in ((o.gate[:4], o.up, o.down), (o.gate, o.up[:, :3], o.down), (o.gate, o.up, o.down[:, :4])):
        with pytest.raises(ValueError, match="do not fit"):
            pack(*weights)
    with pytest.raises(TypeError, match=r"weight is torch\.int8"):
        pack(o.gate.to(torch.int8), o.up, o.down)
    with pytest.raises(ValueError, match="2 dimension"):
        pack(o.gate, o.up[0], o.down)
    with pytest.raises(ValueError, match="neither size may be 0"):
        pack(o.gate[:0], o.up[:0], o.down[:, :0])
    with pytest.raises(ValueError, match="65,536"):
        pack(torch.zeros(1, 65537), torch.zeros(1, 65537), torch.zeros(3, 1))


@pytest.mark.amx
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_int8_refuses_weights_that_are_not_finite(place: int, value: float) -> None:
    weights = [weight.clone() for weight in operands(1, 40, 20, 33).weights]
    weights[place][-1, -1] = value
    with pytest.raises(ValueError, match="not finite"):
        pack_int8_gated_mlp(*weights)


@PACKS
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx"])
def test_another_instruction_set_is_refused(pack: Pack, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    with pytest.raises(ValueError, match=f"for amx alone, asked for '{isa}'"):
        pack(*operands(1, 4, 5, 3).weights)
