"""Paths become sources: what is read, what is skipped and said so, what is refused."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from antiphon.document import Document, Source
from antiphon.engine.errors import InputError
from antiphon.sharding import Shard


class CharacterTokenizer:
    """One token for each character."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return [ord(character) for character in text], [(index, index + 1) for index in range(len(text))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with readable files at two depths, and one of each kind that is skipped."""
    root = tmp_path / "docs"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_text("bee")
    (root / "a.md").write_text("# ay")
    (root / "sub" / "deep" / "c.py").write_text("c = 1\n")
    (root / "empty.txt").write_text("")
    (root / "blank.txt").write_text(" \n")
    (root / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (root / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (root / ".git" / "config").write_text("secret")
    (root / "loop").symlink_to(root, target_is_directory=True)
    (root / "gone").symlink_to(root / "nothing")
    os.mkfifo(root / "pipe")
    return root


def names(document: Document) -> list[str]:
    return [Path(source.name).name for source in document.sources]


def test_a_folder_is_read_recursively_in_order_and_says_what_it_skipped(folder: Path) -> None:
    document = Document.from_paths([folder])
    assert names(document) == ["a.md", "b.txt", "c.py"]
    said = "\n".join(document.skipped)
    for name in ("empty.txt", "blank.txt", "image.png", "latin.txt", ".git", "loop", "gone", "pipe"):
        assert f"{folder / name}: " in said
    assert len(document.skipped) == 8


@pytest.mark.parametrize("name", ["empty.txt", "blank.txt", "image.png", "latin.txt", "gone"])
def test_a_bad_file_named_directly_is_an_error_even_beside_good_ones(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match=name):
        Document.from_paths([folder / "b.txt", folder / name])


def test_a_glob_takes_its_matches_sorted_and_skips_bad_ones(folder: Path) -> None:
    document = Document.from_paths([str(folder / "*.txt")])
    assert names(document) == ["b.txt"] and len(document.skipped) == 3
    assert names(Document.from_paths([str(folder / "**" / "*.py")])) == ["c.py"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("brackets")
    (tmp_path / "a1.txt").write_text("match")
    assert Document.from_paths([str(tmp_path / "a[1].txt")]).sources[0].text == "brackets"


def test_a_file_reached_twice_is_read_once_and_the_order_given_is_kept(folder: Path) -> None:
    document = Document.from_paths([folder / "sub", str(folder / "b.txt"), str(folder)])
    assert names(document) == ["c.py", "b.txt", "a.md"]


def test_names_are_the_paths_as_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert [source.name for source in Document.from_paths(["b.txt", "sub"]).sources] == ["b.txt", "sub/deep/c.py"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no document"),
        ([""], "empty path"),
        (["/nowhere/at/all"], "no such file"),
        (["/nowhere/*.txt"], "no file matches"),
        (["bad\0name"], "no such file"),
        (["x" * 5000], "can't be read"),
        ("book.txt", "list of paths"),
        (["/dev/null"], "neither a file"),
    ],
)
def test_paths_that_lead_nowhere_are_input_errors(paths: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Document.from_paths(paths)


def test_a_folder_with_nothing_to_read_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    for index in range(7):
        (tmp_path / f"{index}.bin").write_bytes(b"\0\1")
    with pytest.raises(InputError, match=r"(?s)nothing that can be read.*0\.bin.*and 2 more"):
        Document.from_paths([tmp_path])


def test_standard_input_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("piped \u4e2d".encode())))
    assert Document.from_paths(["-"]).sources == (Source("-", "piped \u4e2d"),)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(InputError, match="-: is empty"):
        Document.from_paths(["-"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="no standard input"):
        Document.from_paths(["-"])


def test_the_size_bound_is_checked_for_files_and_for_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "big.txt"
    file.write_text("x" * 11)
    assert Document.from_paths([file], max_file_bytes=11).sources
    with pytest.raises(InputError, match="11 bytes, more than the 10"):
        Document.from_paths([file], max_file_bytes=10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 11)))
    with pytest.raises(InputError, match="larger than the 10"):
        Document.from_paths(["-"], max_file_bytes=10)


def test_a_sparse_file_over_the_bound_is_refused_without_being_read(tmp_path: Path) -> None:
    file = tmp_path / "huge.txt"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(InputError, match="allowed for one file"):
        Document.from_paths([file])


def test_a_name_that_is_not_text_can_be_printed(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(path).write_text("words")
    assert Document.from_paths([tmp_path]).sources[0].name.encode("utf-8")


def test_lines_count_from_one_and_pages_replace_lines() -> None:
    document = Document.from_text("one\r\ntwo\rthree\n")
    assert document.sources[0].text == "one\ntwo\nthree\n"
    assert [document.locate(0, start) for start in (0, 3, 4, 8, 13, 14)] == [
        (1, None), (1, None), (2, None), (3, None), (3, None), (4, None),
    ]  # fmt: skip
    paged = Document((Source("p", "ab\n\ncd", (0, 3, 4)),))
    assert [paged.locate(0, start) for start in (0, 2, 3, 4, 6)] == [(None, page) for page in (1, 1, 2, 3, 3)]
    for start in (-1, 15):
        with pytest.raises(InputError, match="no character"):
            document.locate(0, start)


def test_text_is_in_nfc_and_offsets_are_into_that_text() -> None:
    source = Document.from_text("cafe\u0301 here").sources[0]
    assert source.text == "café here" and source.text.index("here") == 5


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b", "a" + "\u0301\u0316" * 1_000_000])
def test_text_that_is_no_text_is_refused_at_once(text: str) -> None:
    with pytest.raises(InputError):
        Document.from_text(text)


def test_shards_are_numbered_over_the_document_and_never_cross_sources() -> None:
    document = Document((Source("a", "aaaa bbbb cccc"), Source("b", ""), Source("c", "dd")))
    assert document.sharded(CharacterTokenizer(), 5) == (
        Shard(0, 0, 0, 4, "aaaa"),
        Shard(1, 0, 5, 9, "bbbb"),
        Shard(2, 0, 10, 14, "cccc"),
        Shard(3, 2, 0, 2, "dd"),
    )


def test_an_empty_document_has_no_shards_but_wrong_sizes_are_refused_all_the_same() -> None:
    assert Document.from_text("").sharded(CharacterTokenizer(), 5) == ()
    with pytest.raises(InputError, match="--shard-tokens"):
        Document.from_text("").sharded(CharacterTokenizer(), 0)
    with pytest.raises(InputError, match="--shard-overlap"):
        Document(()).sharded(CharacterTokenizer(), 10, 5)
