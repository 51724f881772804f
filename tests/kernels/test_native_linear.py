"""The native linear kernel: right against float64, the same bits whatever stands beside a row, and clear refusals."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels import native

BLOCK_K = 256  # csrc/cpu/linear.h
EPSILON = 2.0**-24  # half a unit in the last place of float32, relative
ROUNDS_X = ("amx", "avx512_bf16")
STORAGES: tuple[native.Storage, ...] = ("float32", "bfloat16")


@pytest.fixture(params=["amx", "avx512_bf16", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each form that this machine can run; a form it cannot run has nothing to check here."""
    name: str = request.param
    assert native.available() is None, native.available()
    if name not in native.supported_isas():
        name = "portable"
    monkeypatch.setenv(native.ISA_VARIABLE, name)
    return name


def operands(rows: int, num_k: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, num_k, generator=generator)
    weight = torch.randn(columns, num_k, generator=generator)
    bias = torch.randn(columns, generator=generator)
    return x, weight, bias


def stored(weight: Tensor, storage: native.Storage) -> Tensor:
    """The values that the kernel has, in float64."""
    return weight.to(getattr(torch, storage)).to(torch.float64)


def seen(x: Tensor, storage: native.Storage) -> Tensor:
    """The values of x that the kernel multiplies: some forms round x too where the weight is bfloat16."""
    return x.bfloat16().float() if native.isa() in ROUNDS_X and storage == "bfloat16" else x


def error_and_bound(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """|y - exact| and a bound that holds for any values: one rounding per multiply and add of the longest chain."""
    exact = x.double() @ weight.T + bias.double()
    size = x.double().abs() @ weight.abs().T + bias.double().abs()
    longest = x.shape[1] if native.isa() == "avx512_bf16" else BLOCK_K
    chain = 2 * min(x.shape[1], longest) + -(-x.shape[1] // longest) + 1
    return (y.double() - exact).abs(), size * (chain * EPSILON)


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), num_k=st.integers(1, 600), columns=st.integers(1, 200), seed=st.integers(0, 9))
def test_any_shape_is_within_rounding_of_float64(
    storage: native.Storage, rows: int, num_k: int, columns: int, seed: int
) -> None:
    x, weight, bias = operands(rows, num_k, columns, seed)
    y = native.pack_linear(weight, bias, storage).forward(x)
    error, bound = error_and_bound(y, seen(x, storage), stored(weight, storage), bias)
    assert (error <= bound).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 255, 15), (6, 256, 16), (7, 257, 17), (150, 513, 33), (301, 70, 130)])
def test_every_form_is_right_and_writes_every_element(
    isa: str, storage: native.Storage, shape: tuple[int, int, int]
) -> None:
    x, weight, bias = operands(*shape)
    out = torch.full((shape[0], shape[2]), float("nan"))
    y = native.pack_linear(weight, bias, storage).forward(x, out=out)
    assert y is out
    error, bound = error_and_bound(y, seen(x, storage), stored(weight, storage), bias)
    assert (error <= bound).all()


def test_the_bound_notices_a_wrong_panel() -> None:
    """Negative control: one panel of the weight taken for another moves the result past the bound."""
    x, weight, bias = operands(9, 300, 64)
    swapped = torch.cat([weight[16:32], weight[:16], weight[32:]])
    error, bound = error_and_bound(native.pack_linear(swapped, bias)(x), x, stored(weight, "float32"), bias)
    assert not (error <= bound).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(isa: str, storage: native.Storage) -> None:
    x, weight, bias = operands(130, 777, 53)
    layer = native.pack_linear(weight, bias, storage)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(130)])
    for rows in range(1, 131):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
        assert torch.equal(layer(x[130 - rows :]), alone[130 - rows :]), rows


def test_the_same_bits_with_many_chunks_of_rows(isa: str) -> None:
    """More rows than one packed chunk of x holds."""
    x, weight, bias = operands(300, 20_001, 17)
    layer = native.pack_linear(weight, bias)
    assert torch.equal(layer(x), torch.cat([layer(x[i : i + 1]) for i in range(300)]))


def test_another_order_of_summation_has_other_bits() -> None:
    """Negative control: the equality above can fail, since k taken in another order gives other bits."""
    x, weight, _ = operands(8, 777, 64)
    order = torch.randperm(777, generator=torch.Generator().manual_seed(1))
    y = native.pack_linear(weight)(x)
    assert not torch.equal(native.pack_linear(weight[:, order])(x[:, order]), y)


@pytest.mark.parametrize("rows", [1, 6, 7, 130])
def test_the_same_bits_with_any_number_of_threads(rows: int) -> None:
    x, weight, bias = operands(rows, 500, 333)
    residual = torch.randn(rows, 333, generator=torch.Generator().manual_seed(1))
    layer = native.pack_linear(weight, bias)
    expected = layer(x, residual)
    for threads in (2, 3, 5):
        native.set_num_threads(threads)
        again = native.pack_linear(weight, bias)  # packing is divided too
        assert torch.equal(layer(x, residual), expected) and torch.equal(again(x, residual), expected), threads


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 256, 15), (6, 257, 16), (7, 40, 17), (150, 600, 33)])
def test_the_residual_is_added_last(isa: str, storage: native.Storage, shape: tuple[int, int, int]) -> None:
    x, weight, bias = operands(*shape)
    residual = torch.randn(shape[0], shape[2], generator=torch.Generator().manual_seed(1))
    layer = native.pack_linear(weight, bias, storage)
    out = torch.full((shape[0], shape[2]), float("nan"))
    assert torch.equal(layer(x, residual, out=out), layer(x) + residual)
    assert torch.equal(layer(x, residual.T.contiguous().T), out)
    assert not torch.equal(layer(x, residual.flip(0, 1) + 1), out)


def test_the_number_of_threads_can_be_set_and_asked() -> None:
    native.set_num_threads(3)
    assert native.num_threads() == 3
    with pytest.raises(ValueError, match="at least 1, got 0"):
        native.set_num_threads(0)
    assert native.num_threads() == 3


def test_bfloat16_storage_rounds_as_torch_does_and_halves_the_bytes() -> None:
    special = [1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, float("inf"), float("-inf"), float("nan"), -0.0]
    weight = torch.cat([torch.tensor(special), torch.randn(3000, generator=torch.Generator().manual_seed(0))])[:, None]
    layer = native.pack_linear(weight, storage="bfloat16")
    expected = weight[:, 0].bfloat16().float()
    if layer.isa in ROUNDS_X:
        expected[special.index(1e-40)] = 0.0  # their instructions take subnormal numbers for zeros
    torch.testing.assert_close(layer(torch.ones(1, 1))[0], expected, rtol=0, atol=0, equal_nan=True)
    whole = torch.zeros(64, 64)  # no form pads it
    assert native.pack_linear(whole, storage="bfloat16").num_bytes * 2 == native.pack_linear(whole).num_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_packed_exactly(dtype: torch.dtype) -> None:
    x, weight, bias = operands(3, 100, 1100)
    low = weight.to(dtype)
    assert torch.equal(native.pack_linear(low, bias)(x), native.pack_linear(low.float(), bias)(x))


def test_strided_operands_and_leading_sizes_are_served() -> None:
    x, weight, _ = operands(12, 40, 24)
    layer = native.pack_linear(weight)
    assert torch.equal(native.pack_linear(weight.T.contiguous().T)(x), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))
    assert torch.equal(layer(x.view(3, 4, 40)), layer(x).view(3, 4, 24))
    assert layer(x[:0]).shape == (0, 24)


def test_a_nan_stays_in_its_row() -> None:
    x, weight, _ = operands(20, 300, 40)
    layer = native.pack_linear(weight)
    expected = layer(x)
    x[7, 299] = float("nan")
    y = layer(x)
    assert y[7].isnan().all()
    keep = torch.arange(20) != 7
    assert torch.equal(y[keep], expected[keep])


def test_wrong_operands_are_refused_before_any_work() -> None:
    x, weight, bias = operands(4, 32, 48)
    layer = native.pack_linear(weight, bias)
    out = torch.full((4, 48), 7.0)
    for wrong in (x.double(), x.bfloat16()):
        with pytest.raises(TypeError, match="float32"):
            layer(wrong, out=out)
        with pytest.raises(TypeError, match="residual is"):
            layer(x, out.to(wrong.dtype))
    with pytest.raises(ValueError, match="last size must be 32"):
        layer(x[:, :31], out=out)
    with pytest.raises(ValueError, match="residual is"):
        layer(x, torch.zeros(1, 48))
    for shared in ({"residual": out}, {"residual": out.clone(), "x": out.view(6, 32)[:4]}):
        with pytest.raises(ValueError, match="shares memory"):
            layer(shared.get("x", x), shared["residual"], out=out)
    for wrong_out in (torch.empty(3, 48), torch.empty(48, 4).T, torch.empty(4, 96)[:, ::2]):
        with pytest.raises(ValueError, match="out is"):
            layer(x, out=wrong_out)
    assert (out == 7.0).all()


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(TypeError, match=r"weight is torch\.int64"):
        native.pack_linear(torch.zeros(4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 dimension"):
        native.pack_linear(torch.zeros(4))
    with pytest.raises(ValueError, match="neither size may be 0"):
        native.pack_linear(torch.zeros(0, 4))
    with pytest.raises(ValueError, match=r"needs \(4,\)"):
        native.pack_linear(torch.zeros(4, 4), torch.zeros(5))
    with pytest.raises(ValueError, match="storage is 'int8'"):
        native.pack_linear(torch.zeros(4, 4), storage="int8")  # type: ignore[arg-type]


def test_avx512_gives_the_bits_of_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has both; tests/csrc/wide/test_avx512.cpp shows the same by emulation on any."""
    x, weight, bias = operands(40, 600, 70)
    for storage in STORAGES:
        results = []
        for isa in ("avx512", "avx2"):
            if isa in native.supported_isas():
                monkeypatch.setenv(native.ISA_VARIABLE, isa)
                results.append(native.pack_linear(weight, bias, storage)(x))
        assert all(torch.equal(result, results[0]) for result in results)


def test_a_known_instruction_set_that_is_not_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in {"amx", "avx512_bf16", "avx512", "avx2"} - set(native.supported_isas()):
        monkeypatch.setenv(native.ISA_VARIABLE, isa)
        with pytest.raises(ValueError, match="this machine has only"):
            native.pack_linear(torch.zeros(4, 4))


def test_an_unknown_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "avx3")
    with pytest.raises(ValueError, match="amx, avx512_bf16, avx512, avx2, portable"):
        native.pack_linear(torch.zeros(4, 4))


def may_have_huge_pages(tensor: Tensor) -> bool:
    """Whether the system was asked for huge pages in the middle of a tensor."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


def test_a_large_result_is_asked_for_in_huge_pages_and_fresh_memory_is_not() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        return  # a system without them has nothing to ask for
    layer = native.pack_linear(torch.ones(2048, 8))
    assert may_have_huge_pages(layer(torch.ones(8192, 8)))  # 64 MiB: more than malloc ever keeps
    assert not may_have_huge_pages(torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_extension_brings_no_openmp_runtime() -> None:
    """OpenMP's threads spin beside a busy process; the pool's own sleep."""
    path = native.extension().__file__
    load = f"from importlib.util import *\nmodule_from_spec(spec_from_file_location('_native', {path!r}))"
    code = f"{load}\nprint(open('/proc/self/maps').read())"
    maps = run_python(code)
    assert "_native" in maps
    assert "gomp" not in maps and "libomp" not in maps


def test_the_pool_lets_the_interpreter_end_and_works_after_a_fork() -> None:
    code = """
import os, torch
from antiphon.kernels import native
native.set_num_threads(2)
x, layer = torch.ones(40, 64), native.pack_linear(torch.ones(640, 64))
assert (layer(x) == 64).all()
child = os.fork()
good = bool((layer(x) == 64).all())
if child == 0:
    os._exit(0 if good else 1)
assert good and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
"""
    assert run_python(code) == "done\n"
