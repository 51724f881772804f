"""The AVX-512 and AMX kernels on any machine: their own source, on emulated instructions, to the bit.

tests/csrc/wide/emulated/immintrin.h stands in for the compiler's header of intrinsics. The drivers compare with naive
loops over odd shapes, rows 1 to 130, poisoned outputs, every row alone and among others, and several threads, under the
address sanitizer. What runs here is the arithmetic and the addresses; that the real build has the real instructions is
read from the extension. How fast they are, no emulation can say.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from antiphon.kernels import native

ROOT = Path(__file__).parents[2]
FLAGS = ["-O1", "-std=c++17", "-ffp-contract=off", "-fsanitize=address", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
FOLDERS = ["-Itests/csrc/wide", "-Icsrc"]
EMULATED = ["-DANTIPHON_EMULATED", "-Itests/csrc/wide/emulated"]  # the folder of the header that must come first
REAL = ["-iquote", "tests/csrc/wide/emulated"]  # what the drivers themselves take from it
DRIVERS = {
    "amx_bf16": ["amx_bf16"],
    "amx_normed": ["amx_normed", "amx_bf16", "int8_amx", "int8_linear"],
    "int8": ["int8_amx", "int8_tile_avx512", "int8_linear"],
    "bf16_attention": ["attention_amx", "attention_avx512_bf16", "attention", "attention_plan", "cpu_features"],
    "avx512": ["tile_avx512", "linear"],
    "avx512_bf16": ["avx512_bf16_linear", "amx_bf16"],
}


def build_and_run(name: str, folder: Path, instructions: list[str]) -> subprocess.CompletedProcess[str]:
    """Builds `tests/csrc/wide/test_<name>.cpp` with the kernels that it drives, and runs it."""
    sources = [f"csrc/cpu/{kernel}.cpp" for kernel in DRIVERS[name]]
    sources += [f"tests/csrc/wide/test_{name}.cpp", "tests/csrc/wide/fresh_threads.cpp"]
    has_fma = re.search(r"^flags.*\bfma\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    machine = ["-mfma"] if has_fma else []  # only for the speed of std::fma
    command = ["g++", *FLAGS, *machine, *instructions, *FOLDERS, *sources, "-pthread"]
    subprocess.run([*command, "-o", str(folder / name)], cwd=ROOT, check=True)
    return subprocess.run([folder / name], capture_output=True, text=True)


@pytest.mark.parametrize("name", DRIVERS)
def test_emulated_kernels_keep_their_promise_to_the_bit(name: str, tmp_path: Path) -> None:
    expect_good(build_and_run(name, tmp_path, EMULATED))


@pytest.mark.parametrize("name", ["bf16_attention", "avx512_bf16"])
def test_the_processor_keeps_the_same_promise(name: str, tmp_path: Path) -> None:
    """A machine without the instructions has nothing to check here."""
    if "avx512_bf16" in native.supported_isas():
        expect_good(build_and_run(name, tmp_path, REAL))


def expect_good(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    report = re.search(r"(\d+) checks, 0 failures", result.stdout)
    assert report is not None and int(report[1]) > 600, result.stdout


@pytest.mark.parametrize(
    "instruction",
    [
        "ldtilecfg",
        "tilerelease",
        "tileloadd",
        "tileloaddt1",
        "tilestored",
        "tdpbf16ps",
        "tdpbssd",
        "vcvtne2ps2bf16",
        "vcvtneps2bf16",
        "vreduceps",
        "vscalefps",
        "vrcp14ps",
        "vmovntps",
        r"vdpbf16ps [^,]*%zmm\d+,%zmm\d+",
        r"vpdpbusd %zmm\d+,%zmm\d+,%zmm\d+",
        r"vfmadd231ps [^,]*\{1to16\},%zmm\d+,%zmm\d+",
    ],
)
def test_the_extension_has_the_real_instructions(instruction: str, disassembly: str) -> None:
    assert re.search(rf"\t{instruction}\b" if instruction.isalnum() else rf"\t{instruction}", disassembly)


@pytest.fixture(scope="module")
def disassembly() -> str:
    """The extension's instructions, one space between mnemonic and operands."""
    path = native.extension().__file__
    assert path is not None
    command = ["objdump", "--disassemble", "--no-show-raw-insn", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.sub(r" +", " ", text)
