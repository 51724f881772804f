"""`OwnFolder`: a folder of one process, gone when the process is: at its end, or when the next one comes."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from antiphon.engine.cache_folder import file_lock, try_file_lock

_LOCK = "lock"


class OwnFolder:
    """A new folder in `parent` (made if missing), and those of dead processes there removed.

    Its owner holds a lock on a file in it, which the operating system drops with the process. Folders come and go
    under the lock of `parent`, so none is taken for a dead one's before its own lock is held. Raises OSError.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self._parent = parent
        with file_lock(parent / _LOCK):
            for folder in parent.iterdir():
                if folder.is_dir():
                    _remove_if_dead(folder)
            self.path = parent / f"{os.getpid()}-{secrets.token_hex(4)}"
            self.path.mkdir()
            self._lock = try_file_lock(self.path / _LOCK)

    def close(self) -> None:
        """Removes the folder with all that is in it; a second call does nothing."""
        if self._lock is not None:
            with file_lock(self._parent / _LOCK):
                self._lock.close()
                self._lock = None
                shutil.rmtree(self.path, ignore_errors=True)


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):  # another user's: theirs to remove
        lock = try_file_lock(folder / _LOCK)
        if lock is not None:
            lock.close()
            shutil.rmtree(folder)
