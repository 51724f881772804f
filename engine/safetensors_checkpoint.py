"""A folder of safetensors files as a `Checkpoint`. Pickled formats (.bin, .pt) are never opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from antiphon.engine.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_KINDS = ("F32", "BF16", "F16")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The folder's weight files, sorted by name; raises `ModelError` where they are missing or the index is wrong."""
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    return tuple(folder / name for name in sorted(set(_read_index(folder).values())))


class SafetensorsCheckpoint:
    """One `model.safetensors`, or the files that `model.safetensors.index.json` names. Tensors keep their dtype.

    A file is mapped only while one of its tensors is read: mapped pages count as this process's memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._paths: dict[str, Path] = {}
        for path in weight_files(folder):
            self._add_file(path)
        if not (folder / _SINGLE).is_file():
            self._check_index()

    def names(self) -> tuple[str, ...]:
        """All tensors, file by file."""
        return tuple(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        self._path(name)
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, in memory of its own."""
        path = self._path(name)
        with _opened(path) as handle:
            # A clone: the tensor must outlive the file's mapping, and must not change with the file.
            tensor: torch.Tensor = handle.get_tensor(name).clone()
        return tensor

    def close(self) -> None:
        """Forget the files: none is open between two reads."""
        self._paths.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add_file(self, path: Path) -> None:
        with _opened(path) as handle:
            # The handle is no mapping: it has keys, and cannot be iterated.
            for name in handle.keys():  # noqa: SIM118
                if name in self._paths:
                    raise ModelError(f"{self._folder}: tensor {name!r} stands in two files, {path.name} is the second")
                tensor = handle.get_slice(name)
                if tensor.get_dtype() not in _KINDS:
                    kinds = ", ".join(_KINDS)
                    raise ModelError(f"{path}: tensor {name!r} has dtype {tensor.get_dtype()}, supported are {kinds}")
                self._paths[name], self._shapes[name] = path, tuple(tensor.get_shape())

    def _check_index(self) -> None:
        indexed = set(_read_index(self._folder))
        for name in sorted(indexed ^ set(self._paths)):
            where = "the index, but not the files" if name in indexed else "the files, but not the index"
            raise ModelError(f"{self._folder}: tensor {name!r} is in {where}: download the folder again")

    def _path(self, name: str) -> Path:
        try:
            return self._paths[name]
        except KeyError:
            raise ModelError(f"{self._folder} has no tensor {name!r}, or is closed") from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _read_index(folder: Path) -> dict[str, str]:
    """The index's map from tensor to file, with every file there and inside the folder."""
    path = folder / _INDEX
    if not path.is_file():
        raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}: only safetensors and GGUF files are loaded")
    try:
        weight_map = json.loads(path.read_bytes(), object_pairs_hook=_unique)["weight_map"]
        files = {str(file) for file in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors index: {error}") from error
    for file in sorted(files):
        # By name, not by resolved path: the hub's cache links its files from elsewhere.
        if {PurePosixPath(file).name, PureWindowsPath(file).name} != {file} or not file.endswith(".safetensors"):
            raise ModelError(f"{path} names {file!r}, which is not a safetensors file of this folder")
        if not (folder / file).is_file():
            raise ModelError(f"{path} names {file!r}, which is missing: download the folder again")
    if not files:
        raise ModelError(f"{path} names no file")
    return {str(name): str(file) for name, file in weight_map.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found
