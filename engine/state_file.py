"""A prefix's state as a safetensors file, every byte of which is checked when it comes back.

The header is a function of `_Layout` and the checksum alone, written one way (`_Layout.header`). A reader makes it
again from what it found and compares: names, dtypes, shapes and offsets cannot differ from each other. The checksum,
SHA-256 over the header with an empty checksum and then all tensors in the file's order, covers the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from antiphon.engine.tiers import PrefixState

VERSION = "1"
_FORMAT = "antiphon-prefix-state"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8}
_MAX_HEADER_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 18  # hashed as it is read, while it is in the core's own cache


class StateFileError(Exception):
    """What is wrong with a file."""


class _Entry(NamedTuple):
    name: str
    kind: str  # as safetensors calls it
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Layout:
    """All of a state but its numbers. Raises `StateFileError` for what no state is."""

    key: bytes
    first_token: int
    num_token_ids: int
    kind: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in _DTYPES or len(self.shape) != 4 or min(self.shape) < 1:
            raise StateFileError(f"keys of {self.kind} {self.shape} are none that Antiphon keeps")
        if self.first_token < 0 or self.first_token + self.shape[2] != self.num_token_ids:
            raise StateFileError(
                f"{self.shape[2]} tokens from token {self.first_token} on are not the last of {self.num_token_ids}"
            )

    @property
    def entries(self) -> list[_Entry]:
        """The tensors in the file's order: the widest first, so that each begins where its dtype may."""
        dtype = _DTYPES[self.kind]
        scales = ["k_scale", "v_scale"] if dtype == torch.int8 else []
        return [
            _Entry("token_ids", "I64", torch.int64, (self.num_token_ids,)),
            *(_Entry(name, "F32", torch.float32, self.shape[:3]) for name in scales),
            *(_Entry(name, self.kind, dtype, self.shape) for name in ("k", "v")),
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries)

    def header(self, checksum: str) -> bytes:
        """The file up to its first tensor."""
        metadata = {"format": _FORMAT, "version": VERSION, "key": self.key.hex(), "first_token": str(self.first_token)}
        header: dict[str, Any] = {"__metadata__": {**metadata, "sha256": checksum}}
        offset = 0
        for entry in self.entries:
            offsets = [offset, offset + entry.num_bytes]
            header[entry.name] = {"dtype": entry.kind, "shape": entry.shape, "data_offsets": offsets}
            offset += entry.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


class EncodedState:
    """A state as the bytes of its file. Raises `StateFileError` for tensors that do not go together."""

    def __init__(self, state: PrefixState) -> None:
        kind = next((kind for kind, dtype in _DTYPES.items() if dtype == state.k.dtype), str(state.k.dtype))
        layout = _Layout(state.key, state.first_token, len(state.token_ids), kind, tuple(state.k.shape))
        tensors = {"token_ids": torch.tensor(state.token_ids, dtype=torch.int64), **state.tensors}
        expected = {entry.name: (entry.dtype, entry.shape) for entry in layout.entries}
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        if found != expected:
            raise StateFileError(f"a state of {found} is none that Antiphon keeps: {expected}")
        self._parts = [_bytes_of(tensors[entry.name]) for entry in layout.entries]
        self._header = layout.header(_checksum(layout, self._parts))
        self.num_bytes = len(self._header) + layout.num_bytes

    def write(self, file: IO[bytes]) -> None:
        """Writes the whole file; raises OSError."""
        file.write(self._header)
        for part in self._parts:
            file.write(part)


def read_state(path: Path, key: bytes) -> PrefixState:
    """The state of this key. Nothing is allocated before all sizes agree with the file's own.

    Raises `StateFileError` where anything in the file is not as it was written, OSError where it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would block
        raise StateFileError("it is no regular file")
    with path.open("rb", buffering=0) as file:
        layout, checksum, data_bytes = _read_header(file, key)
        if data_bytes != layout.num_bytes:
            raise StateFileError(f"it has {data_bytes:,} bytes of tensors, and its header names {layout.num_bytes:,}")
        data = torch.empty(layout.num_bytes, dtype=torch.uint8)
        if _read_hashed(file, layout, _bytes_of(data)) != checksum:
            raise StateFileError("its checksum is not that of its bytes")
    tensors, offset = {}, 0
    for entry in layout.entries:
        part = data[offset : offset + entry.num_bytes]
        tensors[entry.name] = part.view(entry.dtype).view(entry.shape)
        offset += entry.num_bytes
    return PrefixState(key, tuple(tensors.pop("token_ids").tolist()), layout.first_token, **tensors)


def _read_header(file: IO[bytes], key: bytes) -> tuple[_Layout, str, int]:
    """The layout, the checksum that the tensors must have, and how many bytes follow."""
    file_bytes = os.fstat(file.fileno()).st_size
    length = file.read(8)
    num_bytes = int.from_bytes(length, "little")
    if len(length) < 8 or num_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise StateFileError(f"its {file_bytes:,} bytes do not begin with a header")
    text = file.read(num_bytes)
    try:
        layout, checksum = _parse(json.loads(text), key)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise StateFileError(f"its header is not that of a state ({type(error).__name__})") from error
    if layout.header(checksum) != length + text:
        raise StateFileError("its header is not as Antiphon writes it")
    return layout, checksum, file_bytes - 8 - num_bytes


def _parse(header: Any, key: bytes) -> tuple[_Layout, str]:
    metadata = header["__metadata__"]
    if metadata["format"] != _FORMAT:
        raise StateFileError("it is another program's")
    if metadata["version"] != VERSION:
        raise StateFileError(f"it has format version {metadata['version']!r:.20}, this is version {VERSION}")
    if metadata["key"] != key.hex():
        raise StateFileError(f"it is the state of key {metadata['key']!r:.70}")
    shape = tuple(int(size) for size in header["k"]["shape"])
    num_token_ids = int(header["token_ids"]["shape"][0])
    layout = _Layout(key, int(metadata["first_token"]), num_token_ids, str(header["k"]["dtype"]), shape)
    return layout, str(metadata["sha256"])


def _read_hashed(file: IO[bytes], layout: _Layout, data: memoryview) -> str:
    """Fills `data` from the file; its checksum, which is wrong where the file ended before."""
    digest = hashlib.sha256(layout.header(""))
    start = 0
    while start < len(data):
        chunk = data[start : start + _CHUNK_BYTES]
        count = file.readinto(chunk)  # type: ignore[attr-defined]
        if not count:
            return ""
        digest.update(chunk[:count])
        start += count
    return digest.hexdigest()


def _checksum(layout: _Layout, parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256(layout.header(""))
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
