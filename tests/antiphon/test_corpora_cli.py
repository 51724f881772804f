"""`antiphon corpora`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tiny_states import random_state

from antiphon.cli.app import main
from antiphon.document import Document, Source
from antiphon.engine.cache_folder import corpora_folder
from antiphon.saved_corpora import SavedCorpora
from antiphon.saved_manifest import Manifest, SavedShard


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of saved corpora, with one of two shards in it."""
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path))
    corpora = SavedCorpora(corpora_folder())
    states = [random_state(seed) for seed in range(2)]
    with closing(corpora.tier(1 << 20)) as tier:
        for state in states:
            tier.put(state)
    document = Document((Source("velm\x1b[2J.txt", "Ada kept the light."),), ("a.bin: is binary",))
    shards = tuple(SavedShard(state.key, len(state.token_ids), 0, 0, 8 + index) for index, state in enumerate(states))
    saved_at = datetime(2026, 12, 1, 9, 30, tzinfo=UTC)
    corpora.save(Manifest("velm", saved_at, "qwen-0.5b", "qwen|bf16", 1024, 64, "Read.", document, shards))
    return tmp_path / "corpora"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["corpora", *arguments])
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "Traceback" not in err
    return code, out, err


def test_an_empty_list_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path))
    assert run(capsys, "list") == (0, "no corpus is saved\n", "")
    assert run(capsys, "list", "--json") == (0, "[]\n", "")


def test_list_has_a_line_for_each_and_names_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "names" / "torn.json").write_text("{")
    code, out, err = run(capsys, "list")
    torn, good = out.splitlines()
    assert (code, err) == (0, "")
    assert torn.startswith("torn") and "corpora remove torn" in torn
    for piece in ("velm", "KiB", "2 shards", "qwen-0.5b", "2026-12-01T09:30:00+00:00"):
        assert piece in good
    rows = json.loads(run(capsys, "list", "--json")[1])
    assert set(rows[0]) == {"name", "error"}
    on_disk = sum(path.stat().st_size for path in (folder / "states").rglob("*.safetensors"))
    assert rows[1] == {
        "name": "velm",
        "saved_at": "2026-12-01T09:30:00+00:00",
        "worker": "qwen-0.5b",
        "num_shards": 2,
        "prefix_tokens": 138,
        "num_bytes": on_disk,
    }


def test_show_has_sources_and_settings_but_no_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "velm")
    assert code == 0
    for piece in (
        "2 shards",
        "138 tokens",
        "at most 1024",
        "qwen|bf16",
        "velm [2J.txt  19 characters",
        "skipped a.bin",
    ):
        assert piece in out
    details = json.loads(run(capsys, "show", "velm", "--json")[1])
    assert details["sources"] == [{"name": "velm\x1b[2J.txt", "characters": 19}]
    assert (details["shard_tokens"], details["shard_overlap"], details["worker_instructions"]) == (1024, 64, "Read.")


def test_verify_ends_with_1_where_something_is_not_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", "velm") == (0, "velm  2 shards are good\n", "")
    path = sorted((folder / "states").rglob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    code, out, err = run(capsys, "verify", "velm")
    assert code == 1 and "damaged" in out and path.name in out
    assert "1 of 2 shards are read again" in err
    code, out, _ = run(capsys, "verify", "velm")
    assert code == 1 and out.endswith("missing\n")


def test_remove_removes_and_a_name_that_is_not_there_ends_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "remove", "velm") == (0, "velm  removed\n", "")
    assert list((folder / "states").rglob("*.safetensors")) == []
    for command in ("show", "remove", "verify"):
        code, out, err = run(capsys, command, "velm")
        assert (code, out) == (2, "") and "no saved corpus 'velm'" in err
        assert run(capsys, command, "../velm")[0] == 2


def test_help_says_what_the_group_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "read once for ever" in out
    assert all(command in out for command in ("list", "show", "remove", "verify"))
