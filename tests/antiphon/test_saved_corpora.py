"""A saved corpus comes back whole, shares its states, and says so where it is damaged."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_states import random_state

from antiphon import saved_corpora, saved_manifest
from antiphon.document import Document, Source
from antiphon.engine.cache_folder import corpora_folder
from antiphon.engine.errors import AntiphonError, InputError
from antiphon.saved_corpora import SavedCorpora, Verification
from antiphon.saved_manifest import Manifest, SavedShard
from antiphon.sharding import Shard

_ROOM = 1 << 24
_DOCUMENT = Document(
    (Source("a.txt", "Ada kept\nthe light."), Source("b.pdf", "one\ntwo é", (0, 4))), ("c: is binary",)
)


def manifest(name: str = "velm", seeds: tuple[int, ...] = (0, 1)) -> Manifest:
    """Shards of `_DOCUMENT` whose states are `random_state(seed)`."""
    shards = tuple(SavedShard(random_state(seed).key, 69, seed % 2, 0, 3 + seed % 2) for seed in seeds)
    time = datetime(2026, 12, 1, 9, 30, tzinfo=UTC)
    return Manifest(name, time, "qwen-0.5b", "qwen|bf16|1", 1024, 64, "Read.\n", _DOCUMENT, shards)


@pytest.fixture
def corpora(tmp_path: Path) -> SavedCorpora:
    return SavedCorpora(tmp_path)


def put_states(corpora: SavedCorpora, *seeds: int) -> None:
    with closing(corpora.tier(_ROOM)) as tier:
        for seed in seeds:
            tier.put(random_state(seed))


def held_seeds(corpora: SavedCorpora) -> list[int]:
    with closing(corpora.tier(_ROOM)) as tier:
        keys = set(tier.keys())
        return [seed for seed in range(10) if random_state(seed).key in keys]


def test_what_was_saved_is_loaded_by_another_process_whole(corpora: SavedCorpora, tmp_path: Path) -> None:
    for name in ("velm", "2nd.one_-"):
        corpora.save(manifest(name))
    again = SavedCorpora(tmp_path)
    assert again.names() == ("2nd.one_-", "velm")
    assert again.load("velm") == manifest()
    assert again.load("velm") != manifest(seeds=(0, 2))
    assert [path.name for path in (tmp_path / "names").iterdir() if path.suffix != ".json"] == []


def test_shards_come_back_with_their_texts() -> None:
    assert manifest().document_shards() == (Shard(0, 0, 0, 3, "Ada"), Shard(1, 1, 0, 4, "one\n"))


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    st.text(),
    st.integers(0, 10**6),
    st.datetimes(datetime(1970, 1, 2), timezones=st.just(timezone(timedelta(hours=5, minutes=30)))),
)
def test_any_manifest_comes_back(text: str, instructions: str, num_tokens: int, saved_at: datetime) -> None:
    shards = (SavedShard(bytes(32), 1 + num_tokens, 0, 0, len(text)),)
    odd = Manifest("a", saved_at, "w", "f", 1 + num_tokens, 0, instructions, Document((Source("é\n", text),)), shards)
    assert Manifest.from_bytes(odd.to_bytes()) == odd


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a b", "é", "a\0", "a\n", "-a", "C:a", "a" * 65, "/etc/passwd"],
)
def test_names_that_are_none_are_refused_everywhere(name: str, corpora: SavedCorpora, tmp_path: Path) -> None:
    for use in (corpora.load, corpora.remove, manifest):
        with pytest.raises(InputError, match="corpus name"):
            use(name)
    assert not (tmp_path / "names").is_symlink() and list((tmp_path / "names").iterdir()) == []
    assert manifest("A" * 64).name == "A" * 64


@pytest.mark.parametrize(
    "change",
    [
        {"saved_at": datetime(2026, 12, 1)},
        {"shard_overlap": 1024},
        {"shard_overlap": -1},
        {"shards": (SavedShard(bytes(31), 1, 0, 0, 1),)},
        {"shards": (SavedShard(bytes(32), 0, 0, 0, 1),)},
        {"shards": (SavedShard(bytes(32), 1, 2, 0, 1),)},
        {"shards": (SavedShard(bytes(32), 1, -1, 0, 1),)},
        {"shards": (SavedShard(bytes(32), 1, 0, 1, 1),)},
        {"shards": (SavedShard(bytes(32), 1, 0, 0, 20),)},
    ],
)
def test_values_that_no_corpus_has_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match="corpus 'velm'"):
        replace(manifest(), **change)  # type: ignore[arg-type]


def test_a_missing_corpus_says_which_there_are(corpora: SavedCorpora) -> None:
    for use in (corpora.load, corpora.remove):
        with pytest.raises(InputError, match="no saved corpus 'tale'; saved are: none"):
            use("tale")
    corpora.save(manifest())
    with pytest.raises(InputError, match="saved are: velm"):
        corpora.load("tale")


def test_removing_leaves_the_states_that_others_use(corpora: SavedCorpora) -> None:
    put_states(corpora, 0, 1, 2, 3)
    corpora.save(manifest("first", (0, 1)))
    corpora.save(manifest("second", (1, 2)))
    corpora.remove("first")
    assert corpora.names() == ("second",)
    assert held_seeds(corpora) == [1, 2, 3], "3 is of no corpus yet: one that is being read"
    corpora.remove("second")
    assert held_seeds(corpora) == [3]


def test_saving_under_a_name_that_is_taken_replaces_it_and_drops_what_only_it_used(corpora: SavedCorpora) -> None:
    put_states(corpora, 0, 1, 2)
    corpora.save(manifest("first", (0, 1)))
    corpora.save(manifest("second", (0,)))
    corpora.save(manifest("first", (2,)))
    assert corpora.load("first") == manifest("first", (2,))
    assert held_seeds(corpora) == [0, 2]


def test_verifying_finds_what_is_damaged_and_what_is_missing(corpora: SavedCorpora, tmp_path: Path) -> None:
    put_states(corpora, 0, 1, 2)
    saved = manifest(seeds=(0, 1, 2, 3))
    corpora.save(saved)
    with closing(corpora.tier(_ROOM)) as tier:
        damaged = tmp_path / "states" / saved.shards[1].key.hex()[:2] / f"{saved.shards[1].key.hex()}.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        found = corpora.verify("velm", tier)
        assert (found.good, found.missing) == ((0, 2), (3,))
        ((index, said),) = found.damaged
        assert index == 1 and str(damaged) in said
        assert corpora.verify("velm", tier) == Verification((0, 2), (), (1, 3)), "what was damaged is deleted"
        put_states(corpora, 1, 3)
        assert corpora.verify("velm", tier) == Verification((0, 1, 2, 3), (), ())
    corpora.save(replace(saved, shards=(replace(saved.shards[0], num_tokens=70),)))
    with closing(corpora.tier(_ROOM)) as tier:
        ((_, said),) = corpora.verify("velm", tier).damaged
        assert "69 tokens" in said


def assert_unusable(corpora: SavedCorpora, path: Path, said: str = "") -> None:
    with pytest.raises(InputError) as caught:
        corpora.load(path.stem)
    for piece in (str(path), said, f"antiphon corpora remove {path.stem}", "save the documents again"):
        assert piece in str(caught.value)


def test_a_manifest_torn_or_flipped_anywhere_is_seen(corpora: SavedCorpora, tmp_path: Path) -> None:
    corpora.save(manifest())
    path = tmp_path / "names" / "velm.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert_unusable(corpora, path)
    for offset in range(len(whole)):
        for bit in (1, 32):  # 32: the case of a letter, such as of a hexadecimal digit
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ bit]) + whole[offset + 1 :])
            assert_unusable(corpora, path)
    path.write_bytes(whole + b" ")
    assert_unusable(corpora, path, "checksum")
    path.write_bytes(whole)
    assert corpora.load("velm") == manifest()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe\0", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"9" * 10_000, "no JSON"),
        (b"[1]", "another program's"),
        (b'{"version":1}', "another program's"),
        (b'{"format":"antiphon-corpus","version":2}', "format version 2, this is version 1"),
        (b'{"format":"antiphon-corpus","version":1}', "an object with name"),
        (b'{"format":"antiphon-corpus","version":1,"corpus":{"name":"velm"}}', "an object with name"),
    ],
)
def test_a_foreign_manifest_is_refused_with_the_reason(
    data: bytes, said: str, corpora: SavedCorpora, tmp_path: Path
) -> None:
    path = tmp_path / "names" / "velm.json"
    path.write_bytes(data)
    assert_unusable(corpora, path, said)


@pytest.mark.parametrize(
    "change",
    [
        {"shards": [["00" * 32, 1, 0, 0]]},
        {"shards": [["zz" * 32, 1, 0, 0, 1]]},
        {"shards": [["00" * 32, 1.0, 0, 0, 1]]},
        {"shards": [["00" * 32, 1, 0, 0, 10**9]]},
        {"shards": [None]},
        {"shard_tokens": True},
        {"document": {}},
        {"saved_at": "yesterday"},
        {"saved_at": "2026-12-01"},
        {"saved_at": "0001-01-01T00:00:00+23:59"},
        {"name": "other"},
        {"name": "../velm"},
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_values_is_refused(
    change: dict[str, object], corpora: SavedCorpora, tmp_path: Path
) -> None:
    envelope = json.loads(manifest().to_bytes())
    envelope["corpus"] |= change
    dumped = saved_manifest._dumped
    envelope["sha256"] = saved_manifest.hashlib.sha256(dumped(envelope["corpus"])).hexdigest()
    path = tmp_path / "names" / "velm.json"
    path.write_bytes(dumped(envelope))
    assert_unusable(corpora, path)


def test_a_manifest_that_is_too_large_or_no_file_is_not_read(
    corpora: SavedCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora.save(manifest())
    path = tmp_path / "names" / "velm.json"
    monkeypatch.setattr(saved_corpora, "MAX_MANIFEST_BYTES", path.stat().st_size)
    assert corpora.load("velm") == manifest()
    monkeypatch.setattr(saved_corpora, "MAX_MANIFEST_BYTES", path.stat().st_size - 1)
    assert_unusable(corpora, path, "more than")
    with pytest.raises(InputError, match="save fewer documents"):
        corpora.save(manifest())
    os.mkfifo(tmp_path / "names" / "pipe.json")
    assert_unusable(corpora, tmp_path / "names" / "pipe.json", "no regular file")


def test_a_damaged_corpus_can_be_removed_and_its_states_go(corpora: SavedCorpora, tmp_path: Path) -> None:
    put_states(corpora, 0, 1, 2)
    corpora.save(manifest("good", (0,)))
    corpora.save(manifest("bad", (0, 1)))
    (tmp_path / "names" / "bad.json").write_text("torn")
    (tmp_path / "names" / "not a name.json").write_text("foreign")
    corpora.remove("bad")
    assert corpora.names() == ("good",)
    assert held_seeds(corpora) == [0]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(
    corpora: SavedCorpora, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_states(corpora, 0, 1, 2)
    corpora.save(manifest())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(AntiphonError, match=r"No space left.*ANTIPHON_CACHE"):
        patch.setattr(os, "fsync", full)
        corpora.save(manifest(seeds=(2,)))
    assert corpora.load("velm") == manifest()
    assert held_seeds(corpora) == [0, 1, 2]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file.*ANTIPHON_CACHE"):
        SavedCorpora(tmp_path / "file" / "corpora")


def test_the_folder_lies_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path))
    assert corpora_folder() == tmp_path / "corpora" and corpora_folder().is_dir()


_CHILD = """
import sys
from contextlib import closing
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_saved_corpora import manifest
from tiny_states import random_state
from antiphon.engine.errors import InputError
from antiphon.saved_corpora import SavedCorpora
corpora, own = SavedCorpora(Path(sys.argv[3])), sys.argv[4]
for turn in range(10):
    with closing(corpora.tier(1 << 24)) as tier:
        for seed in (0, 1):
            tier.put(random_state(seed))
    for name in (own, "shared"):
        corpora.save(manifest(name))
    assert corpora.load(own) == manifest(own)
    for name in (own, "shared"):
        try:
            corpora.remove(name)
        except InputError as error:
            assert name == "shared" and "no saved corpus" in str(error), error
"""


def test_two_processes_save_and_remove_at_once(tmp_path: Path) -> None:
    helpers = Path(__file__).parent
    children = [
        subprocess.Popen([sys.executable, "-c", _CHILD, helpers, helpers.parent / "engine", tmp_path, f"own{index}"])
        for index in range(2)
    ]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    corpora = SavedCorpora(tmp_path)
    assert corpora.names() == ()
    assert held_seeds(corpora) == []
