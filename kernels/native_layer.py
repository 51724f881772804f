"""The C++ kernels of a layer besides its products and attention, and of a model's last steps: float32, on the CPU.

Every row of a result depends on its own row of the input alone, bitwise (csrc/cpu/layer_ops.h, csrc/cpu/log_prob.h).
A decode step makes some hundred of these calls on a few rows each, so the checks are few and cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from antiphon.kernels import native
from antiphon.kernels.rotation import Rotation

if TYPE_CHECKING:
    from antiphon.kernels import _native

_TABLE_STORAGES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativeHead(Protocol):
    """A packed head whose C++ layer can compute a part of its columns: those of `native` and `native_int8`."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def kernel(self) -> _native.Linear | _native.Int8Linear:
        """What `_native.LayerOps.log_prob` takes."""


class LayerOps:
    """The kernels of one instruction set (`native.isa()`, resolved here, once). Immutable; any thread may call it.

    RuntimeError when the extension is not there.
    """

    def __init__(self) -> None:
        reason = native.available()
        if reason is not None:
            raise RuntimeError(reason)
        self.isa = native.isa()
        self._kernels: _native.LayerOps = native.extension().LayerOps(self.isa)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `ops.RmsNorm`; contiguous. x may be a view `[rows, size]` or `[tokens, heads, size]` of a wider matrix,
        its last axis contiguous. TypeError or ValueError for anything else, before any work."""
        shape = x.shape
        size = shape[-1] if shape else 0
        if not (x.dtype is weight.dtype is torch.float32 and x.is_cpu and weight.is_cpu):
            raise TypeError(f"x is {_kind(x)} and weight {_kind(weight)}; rms_norm takes float32 on the CPU")
        if weight.shape != (size,) or not weight.is_contiguous():
            raise ValueError(f"weight is {_layout(weight)}, x {_layout(x)}; weight must be contiguous ({size},)")
        if x.is_contiguous():
            rows = (1, 0, x.numel() // max(size, 1), size)
        elif x.stride(-1) == 1 and len(shape) == 2:
            rows = (1, 0, shape[0], x.stride(0))
        elif x.stride(-1) == 1 and len(shape) == 3:
            rows = (shape[0], x.stride(0), shape[1], x.stride(1))
        else:
            raise ValueError(f"x is {_layout(x)}; need contiguous, or 2 or 3 axes with the last one contiguous")
        out = x.new_empty(*shape)  # a third of the time of torch.empty(shape, dtype=…)
        self._kernels.rms_norm(x.data_ptr(), *rows, size, weight.data_ptr(), eps, out.data_ptr())
        return out

    def silu_and_mul(self, gate_up: Tensor, block: int = 1) -> Tensor:
        """See `ops.SiluAndMul`; `gate_up` contiguous. TypeError or ValueError for anything else, before any work."""
        if gate_up.dtype is not torch.float32 or not gate_up.is_cpu:
            raise TypeError(f"gate_up is {_kind(gate_up)}; silu_and_mul takes float32 on the CPU")
        shape = gate_up.shape
        if len(shape) != 2 or shape[1] % 2 or not gate_up.is_contiguous():
            raise ValueError(f"gate_up is {_layout(gate_up)}; need contiguous [tokens, 2 * size]")
        num_tokens, size = shape[0], shape[1] // 2
        native.check_block(block, size)
        out = native.advised(gate_up.new_empty(num_tokens, size))
        self._kernels.silu_and_mul(gate_up.data_ptr(), num_tokens, size, block, out.data_ptr())
        return out

    def rotate_channels(self, x: Tensor, rotation: Rotation, columns: bool = False) -> Tensor:
        """See `ops.RotateChannels`; every row or column by itself, bitwise. TypeError or ValueError, before any work,
        for another x."""
        if x.dtype is not torch.float32 or not x.is_cpu:
            raise TypeError(f"x is {_kind(x)}; rotate_channels takes float32 on the CPU")
        axis = 0 if columns else 1
        if x.dim() != 2 or x.shape[axis] != rotation.size or not x.is_contiguous():
            raise ValueError(f"x is {_layout(x)}; need contiguous, with {rotation.size} along axis {axis}")
        native.check_block(rotation.block, rotation.size)
        signs, mix = (None if part is None else part.float().contiguous() for part in (rotation.signs, rotation.mix))
        addresses = [0 if part is None else part.data_ptr() for part in (signs, mix)]
        native.extension().rotate_channels(
            *addresses, rotation.size, rotation.block, x.data_ptr(), x.shape[1 - axis], columns
        )
        return x

    def embedding(self, table: Tensor, token_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `ops.Embedding`; exact. The table float32 or bfloat16, `dtype` float32.

        TypeError or ValueError, before any work, for other operands or an id that is not a row of the table.
        """
        if dtype is not torch.float32:
            raise TypeError(f"embedding gives float32, asked for {dtype}")
        storage = _TABLE_STORAGES.get(table.dtype)
        if storage is None or not (table.is_cpu and token_ids.is_cpu and token_ids.dtype is torch.int64):
            raise TypeError(
                f"table is {_kind(table)} and token_ids {_kind(token_ids)}; embedding takes float32 or bfloat16, and "
                "int64, on the CPU"
            )
        if table.dim() != 2 or token_ids.dim() != 1 or not (table.is_contiguous() and token_ids.is_contiguous()):
            raise ValueError(
                f"table is {_layout(table)} and token_ids {_layout(token_ids)}; need contiguous [vocab, size], [tokens]"
            )
        num_rows, size = table.shape
        num_tokens = token_ids.shape[0]
        out = torch.empty(num_tokens, size, dtype=dtype)
        self._kernels.gather_rows(
            table.data_ptr(), storage, num_rows, size, token_ids.data_ptr(), num_tokens, out.data_ptr()
        )
        return out

    def log_prob(self, hidden: Tensor, head: NativeHead, targets: Tensor, vocab_size: int) -> Tensor:
        """See `ops.LogProb`; the head a native packed linear layer. At most 144 rows x 1,024 columns of logits exist
        at a time on each thread. TypeError or ValueError, before any work, for other operands, or a target that is
        not below `vocab_size`."""
        if not (hidden.dtype is torch.float32 and targets.dtype is torch.int64 and hidden.is_cpu and targets.is_cpu):
            raise TypeError(
                f"hidden is {_kind(hidden)} and targets {_kind(targets)}; log_prob takes float32 and int64 on the CPU"
            )
        num_rows = targets.numel()
        if hidden.shape != (num_rows, head.in_features) or targets.dim() != 1:
            raise ValueError(
                f"hidden is {tuple(hidden.shape)} and targets {tuple(targets.shape)}; need (n, {head.in_features}) "
                "and (n,)"
            )
        if not 0 < vocab_size <= head.out_features:
            raise ValueError(f"vocab_size is {vocab_size}; the head has {head.out_features} columns")
        hidden, targets = hidden.contiguous(), targets.contiguous()
        out = hidden.new_empty(num_rows)
        self._kernels.log_prob(head.kernel, hidden.data_ptr(), num_rows, targets.data_ptr(), vocab_size, out.data_ptr())
        return out

    def peak(self, logits: Tensor, allowed: Tensor | None = None) -> tuple[float, int, bool]:
        """See `ops.FindPeak`; both contiguous. TypeError or ValueError for anything else, before any work."""
        if logits.dtype is not torch.float32 or not logits.is_cpu:
            raise TypeError(f"logits is {_kind(logits)}; peak takes float32 on the CPU")
        if logits.dim() != 1 or not logits.is_contiguous():
            raise ValueError(f"logits is {_layout(logits)}; need contiguous [vocab]")
        if allowed is None:
            return self._kernels.peak(logits.data_ptr(), 0, logits.shape[0])
        if allowed.dtype is not torch.bool or not allowed.is_cpu:
            raise TypeError(f"allowed is {_kind(allowed)}; need bool on the CPU")
        if allowed.shape != logits.shape or not allowed.is_contiguous():
            raise ValueError(f"allowed is {_layout(allowed)}; need contiguous {tuple(logits.shape)}")
        return self._kernels.peak(logits.data_ptr(), allowed.data_ptr(), logits.shape[0])


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"


def _layout(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with strides {tensor.stride()}"
