"""The machine is described as it is, its rates are measured, and sizes of memory are read as written."""

from __future__ import annotations

import pytest
import torch

from antiphon.engine.errors import InputError
from antiphon.kernels import native
from antiphon.machine import (
    detect_machine,
    measure_bandwidth,
    measure_matrix_rate,
    measure_register_rate,
    parse_cpuinfo,
)
from antiphon.memory_size import format_memory_size, parse_memory_size

_CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R)   Platinum 8481C
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_the_first_processor_of_cpuinfo_is_described() -> None:
    model, flags = parse_cpuinfo(_CPUINFO)
    assert model == "Intel(R) Xeon(R) Platinum 8481C"
    assert flags == {"fpu", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}


def test_cpuinfo_without_a_name_or_flags_is_not_guessed() -> None:
    assert parse_cpuinfo("") == (None, frozenset())
    assert parse_cpuinfo("processor\t: 0\nFeatures\t: ASIMD sve\n") == (None, frozenset({"asimd", "sve"}))


def test_this_machine_has_cores_and_memory() -> None:
    machine = detect_machine()
    assert machine.cpu
    assert machine.usable_cores >= 1
    assert machine.physical_cores >= 1
    assert machine.memory_bytes > 2**28


def test_the_matrix_rate_is_that_of_a_product_done_here() -> None:
    rate = measure_matrix_rate(torch.float32, size=256)
    # Any processor of the last twenty years does more than 0.1 GFLOP/s, none more than 100 TFLOP/s in float32.
    assert 1e8 < rate < 1e14


def test_int8_products_are_measured_where_torch_has_them() -> None:
    assert 0 <= measure_matrix_rate(torch.int8, size=256) < 1e15


@pytest.mark.parametrize("isa", [pytest.param("amx", marks=pytest.mark.amx), "avx512_bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_register_rate_is_one_that_registers_can_have(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 x 16 sums over 32 of k (bfloat16) or 64 (int8) take a core's tiles 16 cycles: 1,024 or 2,048 operations a
    cycle; two vectors of 16 sums over 2 or 4 take one: 128 or 256. On a machine that others share it is less, but more
    than 1e10 a second. A machine without the instructions refuses."""
    monkeypatch.setattr("antiphon.machine._REGISTER_ROUNDS", 20_000)
    if native.available() is not None:
        pytest.skip(f"no native kernels here: {native.available()}")
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    if isa not in native.supported_isas():
        with pytest.raises(ValueError, match="this machine has only"):
            measure_register_rate(dtype)
        return
    cycle = 1024 if isa == "amx" else 128
    assert 1e10 < measure_register_rate(dtype) < 6e9 * cycle * (2 if dtype == torch.int8 else 1)


def test_a_form_without_a_register_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.available() is not None:
        pytest.skip(f"no native kernels here: {native.available()}")
    monkeypatch.setenv(native.ISA_VARIABLE, "portable")
    with pytest.raises(ValueError, match="amx or avx512_bf16, not 'portable'"):
        measure_register_rate(torch.bfloat16)


def test_memory_is_read_by_native_threads_whatever_their_number() -> None:
    if native.available() is not None:
        pytest.skip(f"no native kernels here: {native.available()}")
    data = torch.randint(-(2**31), 2**31, (2**19 + 16,), dtype=torch.int32)  # two pieces, and a line of a third
    read = {}
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        read[threads] = native.extension().read_memory(data.data_ptr(), data.nbytes)
    assert read[1] == read[2] == read[3]
    data[-16] ^= 1
    assert native.extension().read_memory(data.data_ptr(), data.nbytes) != read[1]


def test_the_bandwidth_is_that_of_memory() -> None:
    bandwidth = measure_bandwidth(32 * 2**20)
    assert 1e8 < bandwidth < 1e13


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8G", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("8GB", 8_000_000_000),
        ("500 MB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("0.5k", 512),
        ("4096", 4096),
        (" 1T ", 2**40),
    ],
)
def test_memory_sizes_are_read_as_written(text: str, num_bytes: int) -> None:
    assert parse_memory_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "8XiB", "1e9", "nan", "0", "0.1", "8GiB!", "٨GiB", "1.GiB", "8 G iB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="8GiB"):
        parse_memory_size(text)


def test_sizes_are_written_in_the_unit_they_fill() -> None:
    assert [format_memory_size(size) for size in (0, 1023, 1024, 3 * 2**29, 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "1.0 TiB",
    ]
