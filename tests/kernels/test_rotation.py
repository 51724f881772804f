"""Rotations are orthogonal, spread what stands out, and are the same in C++ as in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels import native, reference
from antiphon.kernels.native_layer import LayerOps
from antiphon.kernels.ops import KernelContext, RotatedWeight, stacked, whole
from antiphon.kernels.registry import choose_kernels
from antiphon.kernels.rotation import (
    Rotation,
    block_rotation,
    hadamard_matrix,
    largest_block,
    random_signs,
    whole_rotation,
)

needs_native = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))
ISAS = native.supported_isas() if native.available() is None else ()
SIZES = [1, 2, 7, 24, 48, 64, 96, 896, 1536]
BLOCKS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_is_orthogonal_and_always_the_same(size: int) -> None:
    matrix = whole_rotation(size).matrix()
    assert (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-6
    assert torch.equal(matrix, whole_rotation(size).matrix())
    assert not (2 * matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-6


def test_the_signs_are_those_that_stored_prefixes_were_computed_with() -> None:
    assert random_signs(12).tolist() == [1, -1, -1, 1, 1, 1, -1, 1, -1, 1, 1, -1]
    assert abs(random_signs(10_000).mean()) < 0.05


def test_every_channel_is_spread_over_all() -> None:
    """An outlier's share of any rotated channel is small: 1.5 times what it is where all are equal."""
    for size in (896, 1536, 1024):
        assert whole_rotation(size).matrix().abs().max() < 1.5 * size**-0.5


def test_blocks_are_the_largest_powers_of_two_that_divide() -> None:
    assert [largest_block(size, 256) for size in (4864, 8960, 88, 7, 1024, 48)] == [256, 256, 8, 1, 256, 16]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_transform_is_a_product_with_the_matrix_and_its_own_inverse(block: int) -> None:
    x = normal(5, 3 * block)
    found = reference.hadamard(x, block)
    expected = (x.double().view(5, 3, block) @ hadamard_matrix(block)).view(5, -1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reference.hadamard(found, block), x, rtol=1e-5, atol=1e-5)
    assert block == 1 or not torch.allclose(found.roll(1, 1).double(), expected, atol=1e-2)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_gated_activation_is_rotated_in_blocks_with_the_bits_of_the_reference(
    isa: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    ops, gate_up = LayerOps(), normal(41, 6 * block)
    found = ops.silu_and_mul(gate_up, block)
    assert torch.equal(found, reference.hadamard(ops.silu_and_mul(gate_up), block))
    assert torch.equal(found[17:18], ops.silu_and_mul(gate_up[17:18], block))
    assert block == 1 or not torch.equal(found, reference.hadamard(ops.silu_and_mul(gate_up), block // 2))


@needs_native
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lines", [1, 15, 63, 65, 130])
def test_rows_and_columns_are_rotated_as_in_float64(size: int, lines: int) -> None:
    ops, x = LayerOps(), normal(lines, size)
    for rotation in (whole_rotation(size), block_rotation(size, largest_block(size, 32))):
        expected = reference.rotate_channels(x.clone(), rotation)
        found = ops.rotate_channels(x.clone(), rotation)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
        assert torch.equal(ops.rotate_channels(x[-1:].clone(), rotation), found[-1:])
        by_columns = ops.rotate_channels(x.T.contiguous(), rotation, columns=True)
        torch.testing.assert_close(by_columns.T, expected, rtol=1e-5, atol=2e-6)
        assert size < 7 or not torch.allclose(ops.rotate_channels(x + 0.01, rotation), expected, atol=1e-3)


@needs_native
def test_the_number_of_threads_changes_no_bit_of_a_rotated_weight() -> None:
    ops, rotation, x = LayerOps(), whole_rotation(96), normal(96, 300)
    before = native.num_threads()
    found = []
    for threads in (1, 3):
        native.set_num_threads(threads)
        found.append(
            (
                ops.rotate_channels(x.clone(), rotation, columns=True),
                ops.rotate_channels(x.T.clone(memory_format=torch.contiguous_format), rotation),
            )
        )
    native.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


@needs_native
def test_what_cannot_be_rotated_is_refused_before_any_work() -> None:
    ops, x = LayerOps(), normal(4, 48)
    with pytest.raises(TypeError, match="takes float32"):
        ops.rotate_channels(x.double(), whole_rotation(48))
    for wrong, columns in ((x, True), (x[:, :24], False), (x.T, True), (x[0], False)):
        with pytest.raises(ValueError, match="need contiguous, with 48"):
            ops.rotate_channels(wrong, whole_rotation(48), columns)
    for block in (0, 3, 32, -16):
        with pytest.raises(ValueError, match="a power of two that divides 48"):
            ops.rotate_channels(x, Rotation(48, block))
        with pytest.raises(ValueError, match="a power of two that divides 48"):
            ops.silu_and_mul(normal(2, 96), block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotated_weight_is_made_some_rows_at_a_time(dtype: torch.dtype) -> None:
    weight, gain, rotation = normal(37, 48).to(dtype), 2 + normal(48, seed=1), whole_rotation(48)
    rotated = RotatedWeight(weight, gain, rotation, reference.rotate_channels)
    kept = weight.clone()
    expected = (weight.double() * gain.double()) @ rotation.matrix()
    torch.testing.assert_close(whole(rotated).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotated.rows(5, 30).double(), expected[5:30], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole(stacked(rotated, rotated))[37:].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight, kept), "the checkpoint's tensor is left alone"


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.int8])
def test_a_rotation_lowers_the_int8_error_where_channels_stand_out(weight_dtype: torch.dtype) -> None:
    """Three channels of x are 60 times the others, as in real models. float32 has nothing to gain, and activations of
    more than 8 bits little: there a rotation need only do no harm."""
    share = 0.5 if native.isa() in ("amx", "avx512_bf16", "avx512") else 1.5
    context = KernelContext("cpu", torch.float32, weight_dtype, torch.float32, 64)
    kernels, rotation = choose_kernels(context), whole_rotation(896)
    x, weight = normal(50, 896), normal(300, 896, seed=1) * 0.05
    x[:, [7, 300, 801]] *= 60
    exact = x.double() @ weight.double().T

    def error(x: Tensor, packed_of: Tensor | RotatedWeight) -> float:
        """Of the product, beside the spread of one without outliers."""
        return float((kernels.linear(packed_of, None)(x).double() - exact).std() / weight.double().norm(dim=1).mean())

    rotated = RotatedWeight(weight, torch.ones(896), rotation, reference.rotate_channels)
    plain_error, error_after = error(x, weight), error(reference.rotate_channels(x.clone(), rotation), rotated)
    if weight_dtype == torch.float32:
        assert plain_error < 1e-5 and error_after < 1e-5
    else:
        assert error_after < share * plain_error
