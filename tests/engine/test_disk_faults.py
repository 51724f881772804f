"""What goes wrong on a disk: torn, flipped and foreign files, full disks, killed and concurrent processes."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_states import DTYPES, random_state, same_state

from antiphon.engine import state_file
from antiphon.engine.disk_tier import DiskTier
from antiphon.engine.tiers import TierError

_ROOM = 1 << 20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, _ROOM, temporary=False)
    yield tier
    tier.close()


def path_of(folder: Path) -> Path:
    (path,) = folder.rglob("*.safetensors")
    return path


def assert_damaged(tier: DiskTier, path: Path, key: bytes, said: str = "") -> None:
    """It is seen, deleted and no longer counted, and the message says which file and what happens now."""
    with pytest.raises(TierError) as caught:
        tier.fetch(key)
    message = str(caught.value)
    assert str(path) in message and "read again" in message and said in message
    assert not path.exists() and not tier.has(key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_torn_at_any_length_is_damaged(dtype: torch.dtype, tier: DiskTier, tmp_path: Path) -> None:
    state = random_state(dtype=dtype)
    tier.put(state)
    path = path_of(tmp_path)
    whole = path.read_bytes()
    for length in [*range(0, 700, 23), *range(700, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert_damaged(tier, path, state.key)
    path.write_bytes(whole + b"\0")
    assert_damaged(tier, path, state.key, "bytes of tensors")
    path.write_bytes(whole)
    assert same_state(tier.fetch(state.key), state), "the whole file is good"


def test_one_flipped_bit_anywhere_is_seen(tier: DiskTier, tmp_path: Path) -> None:
    """Each byte of a small file, one bit of it; the header's bytes with every bit."""
    state = random_state(first_token=0, num_tokens=1, layers=1, kv_heads=1)
    tier.put(state)
    path = path_of(tmp_path)
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    chosen = random.Random(3)
    for offset in range(len(whole)):
        for bit in range(8) if offset < header_bytes else [chosen.randrange(8)]:
            torn = bytearray(whole)
            torn[offset] ^= 1 << bit
            path.write_bytes(torn)
            with pytest.raises(TierError):
                tier.fetch(state.key)
    path.write_bytes(whole)
    assert same_state(tier.fetch(state.key), state)


def test_a_foreign_safetensors_file_is_not_taken(tier: DiskTier, tmp_path: Path) -> None:
    state = random_state()
    tier.put(state)
    path = path_of(tmp_path)
    save_file({"weight": torch.zeros(4)}, path)
    assert_damaged(tier, path, state.key, "header")
    save_file({"k": state.k, "v": state.v}, path, metadata={"format": "pt"})
    assert_damaged(tier, path, state.key, "another program's")


def test_a_state_under_another_key_is_not_taken(tier: DiskTier, tmp_path: Path) -> None:
    first, second = random_state(0), random_state(1)
    tier.put(first)
    path = path_of(tmp_path)
    target = tmp_path / second.key.hex()[:2] / f"{second.key.hex()}.safetensors"
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    assert_damaged(tier, target, second.key, first.key.hex())


def test_another_version_is_named(tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state()
    with monkeypatch.context() as patch:
        patch.setattr(state_file, "VERSION", "2")
        tier.put(state)
        assert same_state(tier.fetch(state.key), state)
    assert_damaged(tier, path_of(tmp_path), state.key, "format version '2', this is version 1")


def _edited(whole: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: header["k"].update(shape=[2**62, 2, 5, 8]),
        lambda header: header["k"].update(shape=[2**40, 2**40, 5, 8]),
        lambda header: header["k"].update(shape=[-2, -2, 5, 8]),
        lambda header: header["k"].update(shape=[2.0, 2, 5, 8]),
        lambda header: header["k"].update(shape=["2", True, 5, 8]),
        lambda header: header["k"].update(shape=[float("inf"), 2, 5, 8]),
        lambda header: header["k"].update(shape=[2, 2, 8, 5]),
        lambda header: header["k"].update(dtype="F16"),
        lambda header: header["k"].update(dtype="I8"),
        lambda header: header["v"].update(data_offsets=[0, 1]),
        lambda header: header["token_ids"].update(shape=[]),
        lambda header: header["__metadata__"].update(first_token="65"),
        lambda header: header["__metadata__"].update(first_token="6_4"),
        lambda header: header["__metadata__"].update(extra="1"),
        lambda header: header.update(more=header["k"]),
        lambda header: header.pop("v"),
        lambda header: header.update(__metadata__=None),
        lambda header: header.update(k=[1]),
    ],
)
def test_a_header_that_says_something_else_is_damage(
    edit: Callable[[dict[str, Any]], None], tier: DiskTier, tmp_path: Path
) -> None:
    state = random_state()
    tier.put(state)
    path = path_of(tmp_path)
    path.write_bytes(_edited(path.read_bytes(), edit))
    assert_damaged(tier, path, state.key)


@pytest.mark.parametrize("text", [b"", b"[" * 60_000, b"{}", b"null", b"\xff\xfe", b'{"__metadata__":' + b"9" * 5000])
def test_a_header_that_is_none_is_damage(text: bytes, tier: DiskTier, tmp_path: Path) -> None:
    state = random_state()
    tier.put(state)
    path = path_of(tmp_path)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert_damaged(tier, path, state.key)
    path.write_bytes((2**63).to_bytes(8, "little") + text)
    assert_damaged(tier, path, state.key, "do not begin with a header")


def test_a_pipe_in_a_states_place_blocks_nobody(tier: DiskTier, tmp_path: Path) -> None:
    state = random_state()
    tier.put(state)
    path = path_of(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert_damaged(tier, path, state.key, "no regular file")


class _FailingFile:
    """A file whose call number `fail_at` (write, flush, close, counted over all) fails."""

    def __init__(self, file: IO[bytes], calls: list[str], fail_at: int, code: int) -> None:
        self._file, self._calls, self._fail_at, self._code = file, calls, fail_at, code

    def _call(self, name: str) -> None:
        self._calls.append(name)
        if len(self._calls) == self._fail_at:
            raise OSError(self._code, os.strerror(self._code))

    def write(self, data: memoryview) -> int:
        half = bytes(data)[: len(data) // 2]
        self._file.write(half)  # a full disk takes a part
        self._call("write")
        return self._file.write(bytes(data)[len(half) :]) + len(half)

    def flush(self) -> None:
        self._call("flush")
        self._file.flush()

    def fileno(self) -> int:
        self._call("fsync")
        return self._file.fileno()

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._call("close")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_at_any_call_leaves_nothing(
    code: int, tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = random_state()
    real_open, real_replace, real_mkdir = Path.open, Path.replace, Path.mkdir
    calls: list[str] = []
    fail_at = 0

    def count(name: str) -> None:
        calls.append(name)
        if len(calls) == fail_at:
            raise OSError(code, os.strerror(code))

    def failing_open(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        file = real_open(path, mode, *args, **named)
        return _FailingFile(file, calls, fail_at, code) if path.suffix == ".tmp" else file

    def failing_replace(path: Path, target: Path) -> Path:
        count("replace")
        return real_replace(path, target)

    def failing_mkdir(path: Path, *args: Any, **named: Any) -> None:
        count("mkdir")
        real_mkdir(path, *args, **named)

    monkeypatch.setattr(Path, "open", failing_open)
    monkeypatch.setattr(Path, "replace", failing_replace)
    monkeypatch.setattr(Path, "mkdir", failing_mkdir)
    tier.put(state)
    whole = calls.copy()
    assert whole == ["mkdir", *["write"] * 4, "flush", "fsync", "close", "replace"]
    tier.drop(state.key)
    for fail_at in range(1, len(whole) + 1):
        calls.clear()
        with pytest.raises(TierError, match=rf"{os.strerror(code)}.*read again"):
            tier.put(state)
        assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"] == [], whole[
            fail_at - 1
        ]
        assert tier.num_bytes == 0 and not tier.has(state.key)
    fail_at = 0
    tier.put(state)
    assert same_state(tier.fetch(state.key), state)


def test_a_disk_that_cannot_be_read_is_an_error_and_too_many_open_files_costs_no_state(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = random_state()
    tier.put(state)

    def fetch_failing(code: int) -> None:
        def failing(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch, pytest.raises(TierError, match=os.strerror(code)):
            patch.setattr(state_file, "_read_header", failing)
            tier.fetch(state.key)

    fetch_failing(errno.EMFILE)
    assert same_state(tier.fetch(state.key), state)
    fetch_failing(errno.EIO)
    assert not tier.has(state.key) and tier.num_bytes == 0


_CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_states import random_state, same_state
from antiphon.engine.disk_tier import DiskTier
from antiphon.engine.tiers import TierError
tier = DiskTier(Path(sys.argv[2]), 1 << 30, temporary=sys.argv[3] == "temporary")
"""


def _child(code: str, folder: Path, kind: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", _CHILD + code, str(Path(__file__).parent), str(folder), kind]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["temporary", "saved"])
def test_a_process_killed_while_it_writes_leaves_whole_states_alone(kind: str, tmp_path: Path) -> None:
    code = "print('ready', flush=True)\nwhile True:\n    for seed in range(8):\n"
    code += "        tier.put(random_state(seed, num_tokens=2000))\n"
    child = _child(code, tmp_path, kind)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("*.tmp")) and time.monotonic() < deadline:
        pass
    child.kill()
    child.wait()
    child.stdout.close()
    assert len(list((tmp_path / "live").iterdir())) == 2, "the lock, and the dead one's folder"
    tier = DiskTier(tmp_path, _ROOM * 100, temporary=kind == "temporary")
    assert list(tmp_path.rglob("*.tmp")) == []
    assert len(list((tmp_path / "live").iterdir())) == 2, "the lock, and our own"
    for seed in range(8):
        state = random_state(seed, num_tokens=2000)
        if tier.has(state.key):
            assert kind == "saved"
            assert same_state(tier.fetch(state.key), state)
    tier.close()


def test_two_processes_put_fetch_and_drop_the_same_keys_at_once(tmp_path: Path) -> None:
    """Whatever the interleaving, a fetched state is right or absent, and nothing is ever found damaged."""
    code = """
fetched = 0
states = [random_state(seed, num_tokens=200) for seed in range(3)]
for turn in range(150):
    state = states[turn % 3]
    tier.put(state)
    try:
        assert same_state(tier.fetch(state.key), state)
        fetched += 1
    except TierError as error:
        assert "there is no state" in str(error), error
    if turn % 2:
        tier.drop(state.key)
for state in states:
    tier.put(state)
tier.close()
print(fetched)
"""
    children = [_child(code, tmp_path, "saved") for _ in range(2)]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert all(int(output) > 50 for output in outputs)
    tier = DiskTier(tmp_path, _ROOM, temporary=False)
    assert len(list(tier.keys())) == 3
    for seed in range(3):
        state = random_state(seed, num_tokens=200)
        assert same_state(tier.fetch(state.key), state)
    tier.close()
