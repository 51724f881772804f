"""`Checkpoint`: a model's weights on disk, whatever the format."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import torch


class Checkpoint(Protocol):
    """Named tensors, read one at a time.

    Names and shapes are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`). Every count and
    offset was checked against the file's size when it was opened. `read` keeps no state: threads may share it.
    """

    def names(self) -> tuple[str, ...]:
        """All tensors that the files hold."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; raises `ModelError` for a name that is not there."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in float32, bfloat16 or float16, dequantised, in memory of its own; raises `ModelError`."""
        ...

    def close(self) -> None:
        """Release the files. Tensors that were read stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
