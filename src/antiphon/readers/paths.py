"""From what the user typed to files: folders, globs, standard input."""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.engine.errors import InputError

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class FoundFile:
    """A file to read. `named`: the user named it, so that it must be readable; others may be skipped."""

    path: str
    named: bool


@dataclass(frozen=True)
class Skip:
    """Something in a folder that is not read; `text` says what and why."""

    text: str


def find_files(paths: Sequence[str | Path]) -> Iterator[FoundFile | Skip]:
    """The files that `paths` stand for, in the order given, each once (by its real path).

    A folder stands for all files in it, sorted, at any depth, but for hidden ones and links to folders; a glob that is
    not itself a file for its matches, sorted; "-" for standard input. Raises InputError for what is not there.
    """
    if isinstance(paths, str | Path):
        raise InputError(f"paths must be a list of paths, not one path: [{str(paths)!r}]")
    seen: set[str] = set()
    for path in paths:
        for found in _expand(str(path)):
            identity = found.text if isinstance(found, Skip) else os.path.realpath(found.path)
            if identity not in seen:
                seen.add(identity)
                yield found


def load_bytes(path: str, max_file_bytes: int) -> bytes:
    """The content of a file, a pipe, or standard input for "-"; its size is checked before it is read.

    Raises InputError where it is larger than `max_file_bytes`, is not there, or can't be read.
    """
    try:
        if path == STANDARD_INPUT:
            data = _read_standard_input(max_file_bytes + 1)
        else:
            _check_size(path, max_file_bytes)
            with Path(path).open("rb") as file:
                data = file.read(max_file_bytes + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({_reason(error)})") from error
    if len(data) > max_file_bytes:
        raise InputError(f"{path}: is larger than the {max_file_bytes} bytes allowed for one file: split it")
    return data


def _expand(path: str) -> Iterable[FoundFile | Skip]:
    if not path:
        raise InputError("an empty path was given: name a file, a folder, a glob, or - for standard input")
    if path == STANDARD_INPUT:
        return [FoundFile(path, named=True)]
    try:
        if Path(path).is_dir():
            return _walk(path)
        if os.path.lexists(path):
            return [FoundFile(path, named=True)]
        # Path.glob takes no absolute patterns.
        matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []  # noqa: PTH207
    except (OSError, ValueError) as error:
        raise InputError(f"{path!r}: can't be read ({_reason(error)})") from error
    if not matches:
        kind = "no file matches this pattern" if glob.has_magic(path) else "there is no such file or folder"
        raise InputError(f"{path}: {kind} (from {Path.cwd()})")
    return (found for match in matches for found in (_walk(match) if Path(match).is_dir() else _members([match])))


def _walk(folder: str) -> Iterator[FoundFile | Skip]:
    failed: list[Skip] = []

    def note(error: OSError) -> None:
        failed.append(Skip(f"{error.filename}: can't be listed ({_reason(error)})"))

    for parent, folders, files in os.walk(folder, onerror=note):
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        hidden = [name for name in (*folders, *files) if name.startswith(".")]
        yield from (Skip(f"{Path(parent, name)}: is hidden") for name in sorted(hidden))
        yield from (Skip(f"{Path(parent, name)}: is a link to a folder") for name in sorted(linked))
        folders[:] = sorted(set(folders) - set(hidden) - set(linked))
        yield from _members(str(Path(parent, name)) for name in sorted(set(files) - set(hidden)))
    yield from failed


def _members(paths: Iterable[str]) -> Iterator[FoundFile | Skip]:
    # A pipe or a device in a folder could block for ever, so only regular files are opened there.
    for path in paths:
        yield FoundFile(path, named=False) if Path(path).is_file() else Skip(f"{path}: is not a regular file")


def _check_size(path: str, max_file_bytes: int) -> None:
    status = Path(path).stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
        raise InputError(f"{path}: is neither a file, a folder nor a pipe")
    if status.st_size > max_file_bytes:
        raise InputError(
            f"{path}: has {status.st_size} bytes, more than the {max_file_bytes} allowed for one file: split it"
        )


def _read_standard_input(num_bytes: int) -> bytes:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise InputError("-: there is no standard input to read")
    data: bytes = stream.read(num_bytes)
    return data


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
