"""`WeightReader`: hands a checkpoint's tensors to a model one by one, and fails on a missing or an unused one."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.engine.checkpoint import Checkpoint
from antiphon.engine.errors import ModelError

# Buffers that old checkpoints carry, recomputed here from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


class WeightReader:
    """Reads each tensor once, checks its shape, and remembers which were taken.

    `dtype` is that of vectors, `weight_dtype` that of matrices. Where it is int8, a matrix comes in float32 or
    bfloat16, whichever loses nothing of the file: its kernel quantises it.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._weight_dtype = weight_dtype
        self._unused = {name for name in checkpoint.names() if not name.endswith(_DERIVED_SUFFIXES)}

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._unused

    def take(self, name: str, *shape: int) -> Tensor:
        """A matrix or a vector; `ModelError` if it is missing or misshapen."""
        if name not in self._unused:
            raise ModelError(f"weights: tensor {name} is missing from the checkpoint")
        found = self._checkpoint.shape(name)
        if tuple(found) != shape:
            raise ModelError(f"weights: tensor {name} has shape {list(found)}, the config asks for {list(shape)}")
        self._unused.remove(name)
        tensor = self._checkpoint.read(name)
        if len(shape) == 1:
            return tensor.to(self._dtype)
        if self._weight_dtype == torch.int8:
            return tensor.float() if tensor.dtype == torch.float16 else tensor
        return tensor.to(self._weight_dtype)

    def finish(self) -> None:
        """Raises `ModelError` where the checkpoint has tensors that the model did not take."""
        if self._unused:
            some = ", ".join(sorted(self._unused)[:5])
            raise ModelError(f"weights: {len(self._unused)} tensors of the checkpoint are not used: {some}…")
