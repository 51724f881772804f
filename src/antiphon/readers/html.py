"""HTML: what a reader of the page would see, with blocks on lines of their own."""

from __future__ import annotations

import re
import warnings
from io import StringIO

from bs4 import BeautifulSoup
from bs4.dammit import EncodingDetector
from bs4.element import CData, NavigableString, PageElement, Tag

from antiphon.engine.errors import InputError
from antiphon.readers.extracted import Extracted, normalise_text
from antiphon.readers.plain import decode

_DROPPED = frozenset({"script", "style", "template"})
_PARAGRAPHS = frozenset(
    {"p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "table", "ul", "ol", "dl", "section", "article"}
    | {"header", "footer", "main", "nav", "aside", "figure", "form", "hr", "title"}
)
_LINES = frozenset(
    {"br", "div", "li", "tr", "dt", "dd", "caption", "figcaption", "address", "option", "legend", "fieldset"}
    | {"details", "summary"}
)
_CELLS = frozenset({"td", "th"})
_VERBATIM = frozenset({"pre", "textarea"})
_SPACE = re.compile(r"\s+")
# What opens a construct, and what must come later to close it. html.parser scans to the end for each one left open.
_CONSTRUCTS = (("<!--", "-->"), ("<![", "]"), ("<", ">"))


def read_html(name: str, data: bytes, encoding: str) -> Extracted:
    """The visible text of a page; offsets and lines are those of this text, not of the markup.

    Scripts, styles and templates are dropped, white space is collapsed outside `pre`, cells are set apart by tabs.
    Raises InputError where the page can't be decoded (saying which encoding it declares) or holds no text.
    """
    try:
        markup = decode(name, data, encoding)
    except InputError as error:
        declared = EncodingDetector.find_declared_encoding(data, is_html=True)
        raise InputError(f"{error}" + (f" (the page says that it is {declared})" if declared else "")) from error
    # Before parsing, so that a NUL is an error and not a replacement character.
    markup = normalise_text(name, markup)
    try:
        writer = _Writer()
        _walk(_parse(markup), writer)
    except Exception as error:
        raise InputError(f"{name}: can't be parsed as HTML ({type(error).__name__}: {error})") from error
    text = normalise_text(name, writer.text())
    if not text.strip():
        raise InputError(f"{name}: the page holds no text outside of scripts and styles")
    return Extracted(text)


def _parse(markup: str) -> BeautifulSoup:
    for opening, closing in _CONSTRUCTS:
        closed = markup.rfind(closing) + len(closing) if closing in markup else 0
        markup = markup[:closed] + markup[closed:].replace(opening, "&lt;" + opening[1:])
    with warnings.catch_warnings():
        # They tell of XHTML, and of pages that look like a file name; both are read as they should be.
        warnings.simplefilter("ignore")
        return BeautifulSoup(markup, "html.parser")


class _Writer:
    """Collects text, collapsing white space; breaks asked for before the first text or after the last are dropped."""

    def __init__(self) -> None:
        self._out = StringIO()
        self._pending = ""
        self.verbatim = 0

    def add(self, text: str) -> None:
        if self.verbatim:
            self._emit(text)
            return
        collapsed = _SPACE.sub(" ", text)
        if collapsed.startswith(" "):
            self.separate(" ")
        if words := collapsed.strip(" "):
            self._emit(words)
            if collapsed.endswith(" "):
                self.separate(" ")

    def separate(self, separator: str) -> None:
        """The strongest separator asked for between two pieces of text is the one written."""
        order = ("", " ", "\t", "\n", "\n\n")
        if order.index(separator) > order.index(self._pending):
            self._pending = separator

    def text(self) -> str:
        return self._out.getvalue()

    def _emit(self, text: str) -> None:
        if self._out.tell() and text:
            self._out.write(self._pending)
        self._pending = "" if text else self._pending
        self._out.write(text)


def _walk(root: Tag, writer: _Writer) -> None:
    # An explicit stack: pages nest deeper than Python recurses. A pair (tag, False) is the tag's end.
    stack: list[tuple[PageElement, bool]] = [(root, True)]
    while stack:
        node, opening = stack.pop()
        if isinstance(node, Tag):
            if node.name in _DROPPED:
                continue
            _mark(node, opening, writer)
            if opening:
                stack.append((node, False))
                stack.extend((child, True) for child in reversed(node.contents))
        elif type(node) in (NavigableString, CData):
            writer.add(str(node))


def _mark(tag: Tag, opening: bool, writer: _Writer) -> None:
    if tag.name in _PARAGRAPHS:
        writer.separate("\n\n")
    elif tag.name in _LINES:
        writer.separate("\n")
    elif tag.name in _CELLS:
        writer.separate("\t")
    if tag.name in _VERBATIM:
        writer.verbatim += 1 if opening else -1
