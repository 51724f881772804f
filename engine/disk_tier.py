"""`DiskTier`: states as files. Two processes may share a folder, and any of them may be killed at any point."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from antiphon.engine.own_folder import OwnFolder
from antiphon.engine.state_file import EncodedState, StateFileError, read_state
from antiphon.engine.tiers import PrefixState, TierError, absent, no_room

DISK_KNOB = "--disk-memory"
_SUFFIX = ".safetensors"
_NAME = re.compile(rf"[0-9a-f]+{re.escape(_SUFFIX)}")
_LIVE = "live"


class DiskTier:
    """Holds at most `limit_bytes` of files (headers included) in `folder`.

    ```
    folder/aa/KEY.safetensors        a state; aa: the key's first two digits. With `temporary` under live/PID-NONCE/
    folder/live/PID-NONCE/           a process's own: what is being written; removed with it, or by the next to start
    ```
    A file is written under a name of its own and then renamed, so nobody sees a part of one. With `temporary` all
    states go when the tier is closed or its process dies, and no write waits for the disk. Raises `TierError` where
    the folder cannot be used.
    """

    name = "disk"

    def __init__(self, folder: Path, limit_bytes: int, *, temporary: bool) -> None:
        self._limit_bytes = limit_bytes
        self._temporary = temporary
        try:
            self._own = OwnFolder(folder / _LIVE)
        except OSError as error:
            raise TierError(f"disk tier: {folder} cannot be used ({_reason(error)}): choose another folder") from error
        self._states = self._own.path if temporary else folder
        self._numbers = count()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._held_bytes = self._count_bytes()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, as counted at the start and kept; what other processes did since is not in it."""
        return self._held_bytes

    def keys(self) -> Iterator[bytes]:
        """The keys of all states that are there now."""
        return (bytes.fromhex(path.name.removesuffix(_SUFFIX)) for path in self._files())

    def has(self, key: bytes) -> bool:
        """See `Tier.has`."""
        return self._path(key).is_file()

    def file_bytes(self, key: bytes) -> int:
        """Bytes of a state's file; 0 where it is absent."""
        return _size(self._path(key))

    def put(self, state: PrefixState) -> None:
        """See `Tier.put`. A state that is there already is replaced: it has the same bits, or was damaged."""
        path = self._path(state.key)
        try:
            encoded = EncodedState(state)
        except StateFileError as error:
            raise TierError(f"disk tier: state {state.key.hex()} cannot be kept: {error}") from error
        self._reserve(encoded.num_bytes)
        try:
            replaced = self._write(path, encoded)
        except OSError as error:
            free = "free space there, or " if error.errno == errno.ENOSPC else ""
            raise TierError(
                f"disk tier: {path} ({encoded.num_bytes:,} bytes) cannot be written ({_reason(error)}): {free}choose "
                "another folder with ANTIPHON_CACHE; without it the shard is read again"
            ) from error
        else:
            self._count(encoded.num_bytes - replaced)
        finally:
            with self._lock:
                self._pending_bytes -= encoded.num_bytes

    def fetch(self, key: bytes) -> PrefixState:
        """See `Tier.fetch`. Whether the token ids are those of the key is the caller's to check."""
        path = self._path(key)
        try:
            return read_state(path, key)
        except FileNotFoundError:
            raise absent(self.name, key) from None
        except StateFileError as error:
            self.drop(key)
            raise TierError(
                f"disk tier: {path} is damaged: {error}. It is deleted, and its shard read again"
            ) from error
        except OSError as error:
            if error.errno == errno.EIO:
                self.drop(key)
            raise TierError(f"disk tier: {path} cannot be read ({_reason(error)}): its shard is read again") from error

    def drop(self, key: bytes) -> None:
        """See `Tier.drop`."""
        path = self._path(key)
        num_bytes = _size(path)
        with suppress(OSError):  # gone already, or no file: then it is not ours to count
            path.unlink()
            self._count(-num_bytes)

    def close(self) -> None:
        """See `Tier.close`: what is being written, and with `temporary` all states."""
        self._own.close()

    def _path(self, key: bytes) -> Path:
        digits = key.hex()
        return self._states / digits[:2] / f"{digits}{_SUFFIX}"

    def _write(self, path: Path, encoded: EncodedState) -> int:
        """Returns the bytes of the file that was replaced."""
        temporary = self._own.path / f"{next(self._numbers)}.tmp"
        try:
            path.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                encoded.write(file)
                file.flush()
                if not self._temporary:
                    os.fsync(file.fileno())
            replaced = _size(path)
            temporary.replace(path)
            return replaced
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _reserve(self, num_bytes: int) -> None:
        with self._lock:
            if self._taken_bytes() + num_bytes > self._limit_bytes:
                self._held_bytes = self._count_bytes()  # another process may have dropped some
            if self._taken_bytes() + num_bytes > self._limit_bytes:
                raise no_room(self.name, DISK_KNOB, num_bytes, self._taken_bytes(), self._limit_bytes)
            self._pending_bytes += num_bytes

    def _taken_bytes(self) -> int:
        return self._held_bytes + self._pending_bytes

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes += num_bytes

    def _count_bytes(self) -> int:
        return sum(_size(path) for path in self._files())

    def _files(self) -> Iterator[Path]:
        return (path for path in self._states.glob("[0-9a-f][0-9a-f]/*") if _NAME.fullmatch(path.name))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
