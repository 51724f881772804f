"""GGUF files: a strict reader of the header, and a `Checkpoint` that dequantises one tensor at a time.

The header is read here and not by `gguf.GGUFReader`: that one trusts counts and offsets, and takes 18 s for the
embedded models' vocabulary. What was checked is what is read. The `gguf` package supplies the format's constants and
the dequantisation. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from antiphon.engine.errors import ModelError
from antiphon.engine.gguf_config import hf_tensor_name

_MAX_HEADER_BYTES = 256 << 20
_MAX_KEY_BYTES = 65_535
_MAX_STRING_BYTES = 16 << 20
_MAX_ENTRIES = 65_536
_MAX_ARRAY_ELEMENTS = 8 << 20
_MAX_ARRAY_DEPTH = 2
_MAX_DIMS = 4
_MAX_ALIGNMENT = 65_536
# Blocks dequantised at once: the temporaries stay in the processor's cache.
_CHUNK_ELEMENTS = 128 * 1024

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place: `shape` has rows first (the file has them last), `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """All that precedes the tensor data. Fields are int, float, bool, str, or tuples of them."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data_offset: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header; raises `ModelError` for a file that is damaged, cut off or not GGUF.

    Every count, length and offset is compared with the file's size before memory is taken for it.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes < 24:
            raise ModelError(f"{path} is not a GGUF file: it has {size_bytes} bytes only")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data, size_bytes).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


class GgufCheckpoint:
    """The `Checkpoint` of a GGUF file. `read` returns float32.

    The file is read piece by piece and not mapped: mapped pages would count as this process's memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors = {hf_tensor_name(name): tensor for name, tensor in read_gguf_header(path).tensors.items()}
        self._file = path.open("rb", buffering=0)
        self._lock = threading.Lock()

    def names(self) -> tuple[str, ...]:
        """All tensors, in the file's order."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, rows first."""
        return self._tensor(name).shape

    def read(self, name: str) -> torch.Tensor:
        """Dequantise one tensor; extra memory is a few MiB, whatever its size."""
        tensor = self._tensor(name)
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        out = np.empty((math.prod(tensor.shape) // block_elements, block_elements), dtype=np.float32)
        step = max(1, _CHUNK_ELEMENTS // block_elements)
        for start in range(0, len(out), step):
            target = out[start : start + step]
            raw = self._read_bytes(tensor.offset + start * block_bytes, len(target) * block_bytes)
            target[:] = _dequantise(np.frombuffer(raw, dtype=np.uint8).reshape(-1, block_bytes), tensor.kind)
        return torch.from_numpy(out.reshape(tensor.shape))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensor(self, name: str) -> GgufTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self._path} has no tensor {name!r}") from None

    def _read_bytes(self, offset: int, num_bytes: int) -> bytes:
        with self._lock:
            if self._file.closed:
                raise ModelError(f"{self._path} is closed")
            self._file.seek(offset)
            raw = self._file.read(num_bytes)
        if len(raw) != num_bytes:
            raise ModelError(f"{self._path} was cut off while it was read")
        return raw


def _dequantise(blocks: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """`[blocks, block_bytes]` → `[blocks, block_elements]`.

    `gguf.quants.dequantize` regroups into 16 rows a call, 2 to 3 times slower than its own block functions.
    """
    if kind == GGMLQuantizationType.F32:
        return blocks.view(np.float32)
    if kind == GGMLQuantizationType.F16:
        return blocks.view(np.float16).astype(np.float32)
    quant = getattr(gguf.quants, kind.name)
    quant.init_grid()
    values: npt.NDArray[np.float32] = quant.dequantize_blocks(blocks)
    return values


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    return kind in plain or hasattr(getattr(gguf.quants, kind.name, None), "dequantize_blocks")


class _HeaderReader:
    """A cursor over the header that never passes the file's end, nor the header's largest size."""

    def __init__(self, path: Path, data: mmap.mmap, size_bytes: int) -> None:
        self._path = path
        self._data = data
        self._size_bytes = size_bytes
        self._end = min(size_bytes, _MAX_HEADER_BYTES)
        self._offset = 0
        self._array_elements = 0

    def read(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: it does not start with 'GGUF'")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._fault(f"version {version} is not supported, 2 and 3 are")
        num_tensors, num_fields = self._scalar("<Q"), self._scalar("<Q")
        if num_tensors > _MAX_ENTRIES or num_fields > _MAX_ENTRIES:
            raise self._fault(
                f"it declares {num_tensors} tensors and {num_fields} fields, at most {_MAX_ENTRIES} are allowed"
            )
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string(_MAX_KEY_BYTES)
            if key in fields:
                raise self._fault(f"field {key!r} stands twice")
            fields[key] = self._value(self._value_type(), 0)
        if fields.get("split.count", 1) != 1:
            raise ModelError(
                f"{self._path} is one of {fields['split.count']} pieces of a split model: merge them first"
            )
        return self._with_tensors(fields, num_tensors)

    def _with_tensors(self, fields: dict[str, Any], num_tensors: int) -> GgufHeader:
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._fault(f"alignment {alignment!r} is not a power of two from 8 to {_MAX_ALIGNMENT}")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        data_offset = -(-self._offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self._fault(f"tensor {name!r} stands twice")
            tensors[name] = self._placed(name, shape, kind, offset, data_offset, alignment)
        self._check_overlaps(tensors)
        return GgufHeader(self._path, fields, tensors, data_offset)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string(_MAX_KEY_BYTES)
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._fault(f"tensor {name!r} has {num_dims} dimensions, 1 to {_MAX_DIMS} are allowed")
        shape = tuple(self._scalar("<Q") for _ in range(num_dims))[::-1]
        code = self._scalar("<I")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise self._fault(f"tensor {name!r} has the unknown type {code}") from None
        if not _can_dequantise(kind):
            raise ModelError(f"{self._path}: tensor {name!r} has type {kind.name}, which cannot be dequantised here")
        return name, shape, kind, self._scalar("<Q")

    def _placed(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: GGMLQuantizationType,
        offset: int,
        data_offset: int,
        alignment: int,
    ) -> GgufTensor:
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block_elements:
            raise self._fault(
                f"tensor {name!r} has shape {shape}, rows of {kind.name} are multiples of {block_elements}"
            )
        num_bytes = math.prod(shape) // block_elements * block_bytes
        start = data_offset + offset
        if offset % alignment or start + num_bytes > self._size_bytes:
            raise self._fault(
                f"tensor {name!r} takes bytes {start} to {start + num_bytes}, the file has {self._size_bytes} "
                f"(alignment {alignment})"
            )
        return GgufTensor(name, shape, kind, start, num_bytes)

    def _check_overlaps(self, tensors: Mapping[str, GgufTensor]) -> None:
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._fault(f"tensor {tensor.name!r} overlaps the one before it")
            end = tensor.offset + tensor.num_bytes

    def _value_type(self) -> GGUFValueType:
        code = self._scalar("<I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self._fault(f"unknown value type {code}") from None

    def _value(self, kind: GGUFValueType, depth: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string(_MAX_STRING_BYTES)
        if kind == GGUFValueType.ARRAY:
            return self._array(depth + 1)
        value = self._scalar(_SCALARS[kind])
        # The shortest decimal: a written 1e-06 comes back as 1e-06, and not as 9.99999997e-07.
        return float(str(np.float32(value))) if kind == GGUFValueType.FLOAT32 else value

    def _array(self, depth: int) -> tuple[Any, ...]:
        if depth > _MAX_ARRAY_DEPTH:
            raise self._fault(f"arrays are nested deeper than {_MAX_ARRAY_DEPTH}")
        kind, count = self._value_type(), self._scalar("<Q")
        # A string takes 8 bytes at least, an array 12.
        least_bytes = {GGUFValueType.STRING: 8, GGUFValueType.ARRAY: 12}.get(kind) or struct.calcsize(_SCALARS[kind])
        self._array_elements += count
        if self._array_elements > _MAX_ARRAY_ELEMENTS or count * least_bytes > self._end - self._offset:
            raise self._fault(f"an array declares {count} elements, more than the rest of the header can hold")
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        if kind == GGUFValueType.ARRAY:
            return tuple(self._value(kind, depth) for _ in range(count))
        code = _SCALARS[kind][1]
        return struct.unpack(f"<{count}{code}", self._take(count * least_bytes))

    def _strings(self, count: int) -> tuple[str, ...]:
        """`count` calls of `_string` in one loop: a vocabulary and its merges are 300,000 strings."""
        data, end, start = self._data, self._end, self._offset
        found: list[bytes] = []
        for _ in range(count):
            stop = start + 8 + int.from_bytes(data[start : start + 8], "little")
            if stop > end:
                raise self._fault(f"the string at byte {start} passes the header's end at byte {end}")
            found.append(data[start + 8 : stop])
            start = stop
        self._offset = start
        try:
            return tuple(map(bytes.decode, found))
        except UnicodeDecodeError:
            raise self._fault("a string is not UTF-8") from None

    def _string(self, limit_bytes: int) -> str:
        length = self._scalar("<Q")
        if length > limit_bytes:
            raise self._fault(f"a string declares {length} bytes, at most {limit_bytes} are allowed")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._fault("a string is not UTF-8") from None

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _take(self, num_bytes: int) -> bytes:
        start = self._offset
        if num_bytes > self._end - start:
            raise self._fault(f"the header ends at byte {self._end} where {num_bytes} bytes more were declared")
        self._offset = start + num_bytes
        return self._data[start : self._offset]

    def _fault(self, what: str) -> ModelError:
        return ModelError(
            f"{self._path} is a damaged GGUF file (byte {self._offset}): {what}. Fetch or convert it again"
        )
