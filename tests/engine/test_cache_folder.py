"""Where the cache is, and what its writes and locks promise."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import platformdirs
import pytest

from antiphon.engine.cache_folder import cache_folder, file_lock, models_folder, try_file_lock, write_whole
from antiphon.engine.errors import InputError


def test_the_environment_overrides_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path / "new" / "cache"))
    assert cache_folder() == tmp_path / "new" / "cache"
    assert models_folder().is_dir()


def test_the_platform_decides_where_nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTIPHON_CACHE", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, appauthor: str(tmp_path / name))
    assert cache_folder() == tmp_path / "antiphon"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="ANTIPHON_CACHE"):
        cache_folder()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_lock_is_held_by_one_and_freed_by_an_error(tmp_path: Path) -> None:
    path, events = tmp_path / "lock", list[str]()

    def second() -> None:
        with file_lock(path):
            events.append("second")

    thread = threading.Thread(target=second)
    with pytest.raises(RuntimeError), file_lock(path):
        thread.start()
        time.sleep(0.3)
        events.append("first")
        raise RuntimeError
    thread.join(timeout=10)
    assert events == ["first", "second"]


def test_a_lock_is_tried_without_a_wait(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path):
        assert try_file_lock(path) is None
    held = try_file_lock(path)
    assert held is not None and try_file_lock(path) is None
    held.close()
    again = try_file_lock(path)
    assert again is not None
    again.close()


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import pathlib, sys, time\nfrom antiphon.engine.cache_folder import file_lock\n"
        "with file_lock(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    freed = threading.Timer(0.3, holder.kill)
    freed.start()
    started = time.monotonic()
    with file_lock(path):
        assert 0.2 < time.monotonic() - started < 30
    holder.wait()
    holder.stdout.close()
