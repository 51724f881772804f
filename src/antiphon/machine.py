"""What this machine is and can do: processor, instruction sets, and the two measured rates that floors are made of."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from antiphon.kernels import native
from antiphon.kernels.torch_cpu import bf16_is_fast

_CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
_MATRIX_ROWS, _MATRIX_SIZE = 1024, 2048
_READ_BYTES = 512 * 2**20
_REGISTER_ROUNDS = 200_000
_REGISTER_ISAS = ("amx", "avx512_bf16")  # whose rate in registers can be measured


@dataclass(frozen=True)
class Machine:
    """The processor and its memory. `instruction_sets` are those that a kernel here can use, by their Linux names."""

    cpu: str
    instruction_sets: tuple[str, ...]
    physical_cores: int
    usable_cores: int
    memory_bytes: int


@dataclass(frozen=True)
class MachineRates:
    """The best that was measured: matrix products in FLOP/s, memory traffic in bytes/s."""

    matrix_flops_per_second: float
    bandwidth_bytes_per_second: float


def detect_machine() -> Machine:
    """Look at the machine; what cannot be found out is named "unknown" or left out, never guessed."""
    model, flags = parse_cpuinfo(_CPUINFO.read_text()) if _CPUINFO.exists() else (None, _flags_from_torch())
    logical = psutil.cpu_count() or 1
    return Machine(
        cpu=model or platform.processor() or "unknown",
        instruction_sets=tuple(name for name in _INSTRUCTION_SETS if name in flags),
        physical_cores=psutil.cpu_count(logical=False) or logical,
        usable_cores=_usable_cores(logical),
        memory_bytes=psutil.virtual_memory().total,
    )


def parse_cpuinfo(text: str) -> tuple[str | None, frozenset[str]]:
    """The model name and the flags of the first processor in a Linux /proc/cpuinfo."""
    model: str | None = None
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name" and model is None:
            model = " ".join(value.split())
        elif key in ("flags", "Features"):
            return model, frozenset(value.lower().split())
    return model, frozenset()


def measure_rates(weights: torch.dtype) -> MachineRates:
    """Measure both rates with torch's and the native kernels' present number of threads; takes some seconds and about
    1 GiB.

    The matrix rate is the best that products have in float32 or, where `weights` are narrower, in bfloat16 or int8 (a
    kernel may multiply in what the weights are kept in, or widen them); with AMX or AVX-512 BF16, that of its
    instructions in registers.
    """
    if native.available() is None and native.isa() in _REGISTER_ISAS and weights != torch.float32:
        return MachineRates(measure_register_rate(weights), measure_bandwidth())
    narrower = {torch.float32: (), torch.bfloat16: (torch.bfloat16,), torch.int8: (torch.bfloat16, torch.int8)}
    dtypes = [torch.float32, *(dtype for dtype in narrower[weights] if dtype == torch.int8 or bf16_is_fast())]
    return MachineRates(max(measure_matrix_rate(dtype) for dtype in dtypes), measure_bandwidth())


def measure_matrix_rate(dtype: torch.dtype, size: int = _MATRIX_SIZE) -> float:
    """FLOP/s of the best of several products [1024, size] x [size, size], plain and with packed weights; 0 where torch
    has no product of this dtype here. Two operations of integers count as two FLOPs."""
    with torch.inference_mode():
        if dtype == torch.int8:
            candidates = _int8_products(size)
        else:
            left, weight = torch.randn(_MATRIX_ROWS, size).to(dtype), torch.randn(size, size).to(dtype)
            candidates = [lambda: torch.nn.functional.linear(left, weight), *_packed_linear(left, weight)]
        seconds = min((_best_seconds(candidate) for candidate in candidates), default=float("inf"))
        return 2.0 * _MATRIX_ROWS * size * size / seconds


def measure_register_rate(dtype: torch.dtype) -> float:
    """Operations/s of AMX tiles or AVX-512 vectors multiplied in registers (bfloat16 or int8), by all native threads.

    ValueError unless the instruction set in use is amx or avx512_bf16.
    """
    multiply, int8, isa = native.extension().multiply_registers, dtype == torch.int8, native.isa()
    operations = multiply(isa, int8, _REGISTER_ROUNDS)
    return float(operations / _best_seconds(lambda: multiply(isa, int8, _REGISTER_ROUNDS)))


def measure_bandwidth(num_bytes: int = _READ_BYTES) -> float:
    """Bytes/s of the best of a reading sum, a matrix-vector product and a copy (read and written, so twice); with the
    native kernels, of reading by their threads too."""
    with torch.inference_mode():
        source = torch.ones(max(1, num_bytes // (4 * 8192)), 8192)
        vector, target = torch.ones(8192), torch.empty_like(source)
        source_bytes = source.numel() * source.element_size()
        reads: list[Callable[[], object]] = [source.sum, lambda: source @ vector]
        if native.available() is None:
            reads.append(lambda: native.extension().read_memory(source.data_ptr(), source_bytes))
        return max(
            *(source_bytes / _best_seconds(read) for read in reads),
            2 * source_bytes / _best_seconds(lambda: target.copy_(source)),
        )


def _best_seconds(run: Callable[[], object], budget_seconds: float = 0.4) -> float:
    run()
    best = float("inf")
    deadline = time.perf_counter() + budget_seconds
    for _ in range(50):
        start = time.perf_counter()
        run()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            break
    return best


def _packed_linear(left: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], object]]:
    """oneDNN's product with weights packed beforehand, or none where this build of torch or this machine lacks it."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, left.shape[0])
        torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return []
    return [lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")]


def _int8_products(size: int) -> list[Callable[[], object]]:
    """torch's int8 product with int32 sums, or none where this build lacks it."""
    left = torch.randint(-127, 128, (_MATRIX_ROWS, size), dtype=torch.int8)
    weight = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    try:
        torch._int_mm(left[:32], weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        return []
    return [lambda: torch._int_mm(left, weight)]


def _flags_from_torch() -> frozenset[str]:
    # Only Linux has /proc/cpuinfo; elsewhere torch names the best set that it will use.
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return frozenset({"avx2", "avx512f"} if "avx512" in capability else {capability})


def _usable_cores(logical: int) -> int:
    # psutil has no affinity on macOS.
    affinity = getattr(psutil.Process(), "cpu_affinity", None)
    return len(affinity()) if affinity is not None else logical
