"""The C++ kernels for the CPU: what they need, who serves, and the packed linear layer.

The linear kernel sums every output element in one fixed order (csrc/cpu/linear.h), so that a row of the result has the
same bits whatever rows stand beside it, however many threads compute it and however the work was cut.

The instruction set is picked at run time, the best that this machine has (csrc/cpu/cpu_features.h); `ANTIPHON_CPU_ISA`
overrides it:

    amx          AMX tiles for bfloat16 and int8 weights (activations are rounded to bfloat16, or to int8), and for
                 attention over bfloat16 and int8 keys (queries and softmax weights are rounded to bfloat16); else as
                 avx512
    avx512_bf16  avx512, and vectors of bfloat16 for bfloat16 weights and for attention over bfloat16 and int8 keys
                 (what is rounded on AMX is rounded here)
    avx512       F, BW, VL, DQ and VNNI; float32 and bfloat16 weights give the bits of avx2, int8 weights those of amx
    avx2         AVX2 and FMA
    portable     plain C++, for any machine

An instruction set that has no form of some kernel runs that kernel in its next lower form.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from antiphon.kernels.ops import Weight, stored

if TYPE_CHECKING:
    from antiphon.kernels import _native

Storage = Literal["float32", "bfloat16"]

ISA_VARIABLE = "ANTIPHON_CPU_ISA"
_KNOWN_ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")
_LARGE_BYTES = 4 << 20
PACK_ROWS = 512  # rows of a weight that are widened to float32 at a time: what packing holds beyond its two ends


def available() -> str | None:
    """None when the native kernels serve on this machine, else the reason why they do not."""
    try:
        extension()
    except ImportError as error:
        return (
            f"the C++ extension is not there ({error}); install g++ 11 or newer, then install Antiphon again "
            "(`pip install -e .` in a clone)"
        )
    return None


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, the best first. ImportError without the extension."""
    return tuple(extension().supported_isas())


def isa() -> str:
    """The instruction set in use: `amx`, `avx512_bf16`, `avx512`, `avx2` or `portable`.

    ValueError if ANTIPHON_CPU_ISA asks for what is not there.
    """
    supported = supported_isas()
    asked = os.environ.get(ISA_VARIABLE)
    if not asked:
        return supported[0]
    if asked not in _KNOWN_ISAS:
        raise ValueError(f"{ISA_VARIABLE} is {asked!r}; it must be one of {', '.join(_KNOWN_ISAS)}, or unset")
    if asked not in supported:
        raise ValueError(f"{ISA_VARIABLE} is {asked!r}, but this machine has only {', '.join(supported)}")
    return asked


def num_threads() -> int:
    """Threads that work on a native kernel, the caller included: the physical cores that this process may use, unless
    set. ImportError without the extension."""
    return int(extension().num_threads())


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of all native kernels of this process, from the next call on; no bit of any result depends on
    it. ValueError below 1; ImportError without the extension."""
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    extension().set_num_threads(num_threads)


def pack_linear(weight: Weight, bias: Tensor | None = None, storage: Storage = "float32") -> NativePackedLinear:
    """Packs `weight [N, K]` (float32, bfloat16 or float16, on the CPU) and `bias [N]` for the native linear kernel.

    `storage` is what the packed weight is kept in: float32 (exact), or bfloat16 (half the bytes, rounded to nearest
    even). Beside weight and packed weight at most 512 rows in float32 are held. TypeError or ValueError for anything
    else, before any work; RuntimeError when the extension is not there.
    """
    reason = available()
    if reason is not None:
        raise RuntimeError(reason)
    if storage not in get_args(Storage):
        raise ValueError(f"storage is {storage!r}; it must be float32 or bfloat16")
    check_weight(weight, bias)
    form = isa()
    packed = pack_rows(rows_of(weight), tuple(weight.shape), storage, form)
    kept_bias = None if bias is None else float32_copy(bias)
    num_columns, num_k = weight.shape
    return NativePackedLinear(packed, kept_bias, num_columns=num_columns, num_k=num_k, storage=storage, isa=form)


class NativePackedLinear:
    """`y = x @ weight^T (+ bias) (+ residual)` on a weight packed once by `pack_linear`; x, y float32. Immutable."""

    def __init__(
        self, packed: Tensor, bias: Tensor | None, *, num_columns: int, num_k: int, storage: Storage, isa: str
    ) -> None:
        self.in_features = num_k
        self.out_features = num_columns
        self.storage = storage
        self.isa = isa
        self._packed = packed  # keeps the memory alive that the kernel's addresses point to
        self._bias = bias
        bias_address = 0 if bias is None else bias.data_ptr()
        self._kernel: _native.Linear = extension().Linear(
            packed.data_ptr(), bias_address, num_columns, num_k, storage, self.isa
        )

    @property
    def kernel(self) -> _native.Linear:
        """The C++ layer, for kernels that run it a part of its columns at a time (`native_layer.log_prob`)."""
        return self._kernel

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight and the bias."""
        return self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """`x [..., in_features]` to `[..., out_features]`, float32 on the CPU. `residual` has the result's shape and
        is added last; `out` is contiguous and shares no memory with x or residual.

        Every element of the result depends on its own row of x and its own element of residual alone, bitwise.
        TypeError or ValueError, before any work, for another dtype, device or shape. Runs without the interpreter's
        lock, on the pool's threads.
        """
        self._check_operand("x", x, self.in_features)
        shape = (*x.shape[:-1], self.out_features)
        if residual is not None:
            self._check_operand("residual", residual, self.out_features)
            if tuple(residual.shape) != shape:
                raise ValueError(f"residual is {tuple(residual.shape)}; the result is {shape}")
            residual = residual.contiguous()
        x = x.contiguous()
        if out is None:
            out = advised(torch.empty(shape, dtype=torch.float32))
        else:
            self._check_operand("out", out, self.out_features)
            if tuple(out.shape) != shape or not out.is_contiguous():
                raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}; need contiguous {shape}")
            if any(overlap(out, other) for other in (x, residual) if other is not None):
                raise ValueError("out shares memory with x or residual, which are still read when out is written")
        num_rows = out.numel() // self.out_features
        residual_address = 0 if residual is None else residual.data_ptr()
        self._kernel.run(x.data_ptr(), residual_address, num_rows, out.data_ptr())
        return out

    __call__ = forward

    def _check_operand(self, name: str, operand: Tensor, features: int) -> None:
        if operand.dtype != torch.float32 or operand.device.type != "cpu":
            raise TypeError(f"{name} is {operand.dtype} on {operand.device}; this layer takes float32 on the CPU")
        if operand.dim() < 1 or operand.shape[-1] != features:
            raise ValueError(f"{name} is {tuple(operand.shape)}; its last size must be {features}")


def extension() -> ModuleType:
    """The C++ extension. ImportError without it."""
    return importlib.import_module("antiphon.kernels._native")


def advised(out: Tensor) -> Tensor:
    """A new tensor that a kernel will fill, asked for in huge pages if it is large: the allocator takes such memory
    from the system anew each time, and page faults of 4 KiB cost more than many kernels do."""
    if out.nbytes >= _LARGE_BYTES:
        extension().advise_huge_pages(out.data_ptr(), out.nbytes)
    return out


def overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two contiguous tensors share a byte."""
    starts_before_end = left.data_ptr() < right.data_ptr() + right.nbytes
    return starts_before_end and right.data_ptr() < left.data_ptr() + left.nbytes


def check_weight(weight: Weight, bias: Tensor | None) -> None:
    """TypeError or ValueError unless these are a weight `[N, K]` and a bias `[N]` that can be packed."""
    for name, tensor, dims in (("weight", stored(weight), 2), ("bias", bias, 1)):
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or tensor.device.type != "cpu":
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device}; need float32, bfloat16 or float16 on the CPU"
            )
        if tensor.dim() != dims:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must have {dims} dimension(s)")
    if 0 in weight.shape:
        raise ValueError(f"weight is {tuple(weight.shape)}; neither size may be 0")
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise ValueError(f"bias is {tuple(bias.shape)}; weight {tuple(weight.shape)} needs ({weight.shape[0]},)")


def check_block(block: int, size: int) -> None:
    """ValueError unless `block` is a power of two that divides `size`."""
    if block < 1 or block & (block - 1) or size % block:
        raise ValueError(f"block is {block}; it must be a power of two that divides {size}")


def float32_copy(vector: Tensor) -> Tensor:
    """A contiguous float32 copy, for a kernel to keep."""
    return vector.detach().to(torch.float32).contiguous().clone()


Rows = Callable[[int, int], Tensor]


def rows_of(weight: Weight) -> Rows:
    """Rows `[first, end)` of a weight in float32, contiguous."""
    if not isinstance(weight, Tensor):
        return weight.rows
    return lambda first, end: weight.detach()[first:end].to(torch.float32).contiguous()


def pack_rows(rows_of: Rows, shape: tuple[int, ...], storage: Storage, isa: str) -> Tensor:
    """The packed weight of `shape [N, K]` as bytes, in the layout of `isa`, from float32 rows some at a time."""
    native = extension()
    num_columns, num_k = shape
    packed = torch.empty(native.packed_bytes(num_columns, num_k, storage, isa), dtype=torch.uint8)
    native.advise_huge_pages(packed.data_ptr(), packed.nbytes)
    for first in range(0, num_columns, PACK_ROWS):
        rows = rows_of(first, min(num_columns, first + PACK_ROWS))
        native.pack_rows(rows.data_ptr(), first, rows.shape[0], num_k, storage, packed.data_ptr(), isa)
    return packed
