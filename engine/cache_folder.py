"""Where Antiphon keeps what it fetched, and how two processes share that folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import platformdirs

from antiphon.engine.errors import InputError

_POLL_SECONDS = 0.2


def cache_folder() -> Path:
    """The root of the cache: `ANTIPHON_CACHE` where set, else the platform's own cache folder. Made if missing."""
    chosen = os.environ.get("ANTIPHON_CACHE")
    root = Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("antiphon", appauthor=False))
    return _made(root)


def models_folder() -> Path:
    """The folder of fetched model files. Made if missing."""
    return _made(cache_folder() / "models")


def corpora_folder() -> Path:
    """The folder of saved corpora. Made if missing."""
    return _made(cache_folder() / "corpora")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that any reader sees all of it or nothing: under a name of its own, then renamed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` among processes and threads; waits while another holds it.

    The operating system drops the lock with its process, so a killed holder never blocks the next one.
    """
    with path.open("a+b") as file:
        while not _try_lock(file):
            # Polled, so that Ctrl-C ends the wait on every platform.
            time.sleep(_POLL_SECONDS)
        yield


def try_file_lock(path: Path) -> IO[bytes] | None:
    """The same lock without a wait: the open file that holds it until it is closed, or None where another holds it."""
    file = path.open("a+b")
    if _try_lock(file):
        return file
    file.close()
    return None


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cache folder {folder} cannot be made ({error.strerror}): set ANTIPHON_CACHE to a writable folder"
        ) from error
    return folder


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
