"""A document comes back from JSON whole: every kind of source, every character, every page."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from docx import Document as WordDocument
from hypothesis import given
from hypothesis import strategies as st
from tiny_files import pdf

from antiphon.document import Document, Source
from antiphon.document_json import document_from_json, document_to_json

_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200)


@st.composite
def sources(draw: st.DrawFn) -> Source:
    if draw(st.booleans()):
        return Source(draw(_TEXT), draw(_TEXT))
    pages = draw(st.lists(_TEXT, min_size=1, max_size=5))
    return Source(draw(_TEXT), "\n".join(pages), tuple(accumulate((len(page) + 1 for page in pages[:-1]), initial=0)))


def through(document: Document) -> Document:
    return document_from_json(json.loads(json.dumps(document_to_json(document))))


@given(st.lists(sources(), max_size=4), st.lists(_TEXT, max_size=3))
def test_any_document_comes_back_and_locates_as_before(found: list[Source], skipped: list[str]) -> None:
    document = Document(tuple(found), tuple(skipped))
    back = through(document)
    assert back == document
    for index, source in enumerate(found):
        for start in {0, len(source.text) // 2, len(source.text)}:
            assert back.locate(index, start) == document.locate(index, start)


def test_what_every_reader_reads_comes_back(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Ada\r\ncafe\u0301 \U0001f600\u2028\x1b[2J".encode())
    (tmp_path / "b.html").write_text("<h1>Velm</h1><p>Ada &amp; the light</p>")
    (tmp_path / "c.pdf").write_bytes(pdf(["Page one", "Page two"]))
    word = WordDocument()
    word.add_paragraph("The keeper was Ada.")
    word.save(str(tmp_path / "d.docx"))
    (tmp_path / "e.bin").write_bytes(b"\0\1")
    document = Document.from_paths([tmp_path])
    assert len(document.sources) == 4 and len(document.skipped) == 1
    assert document.sources[2].page_starts is not None and len(document.sources[2].page_starts) == 2
    assert through(document) == document
    assert through(Document.from_text("")) == Document.from_text("")


_GOOD: dict[str, Any] = {"sources": [{"name": "a", "text": "one\ntwo", "page_starts": [0, 4]}], "skipped": ["b"]}


def _with(**changes: Any) -> dict[str, Any]:
    return {**_GOOD, "sources": [{**_GOOD["sources"][0], **changes}]}


def test_the_good_example_is_good() -> None:
    assert document_from_json(_GOOD).locate(0, 5) == (None, 2)
    assert document_from_json(_with(page_starts=None)).locate(0, 5) == (2, None)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {"sources": []},
        {**_GOOD, "more": 1},
        {**_GOOD, "skipped": [1]},
        {**_GOOD, "sources": [None]},
        {**_GOOD, "sources": {"0": _GOOD["sources"][0]}},
        _with(name=None),
        _with(text=["one"]),
        _with(text="a\0b"),
        _with(text="a\ud800b"),
        _with(more=1),
        _with(page_starts=[]),
        _with(page_starts=[1]),
        _with(page_starts=[0, 8]),
        _with(page_starts=[0, 4, 3]),
        _with(page_starts=[0, -1]),
        _with(page_starts=[0, True]),
        _with(page_starts=[0, 4.0]),
        _with(page_starts="04"),
    ],
)
def test_what_is_no_document_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        document_from_json(bad)
