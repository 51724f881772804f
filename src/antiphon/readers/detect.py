"""Which reader a file gets: by its content where that is certain, else by its suffix."""

from __future__ import annotations

from pathlib import PurePath

from antiphon.engine.errors import InputError
from antiphon.readers.extracted import Extracted
from antiphon.readers.html import read_html
from antiphon.readers.pdf import read_pdf
from antiphon.readers.plain import read_plain
from antiphon.readers.word import read_word

_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
_WORD_SUFFIXES = frozenset({".docx", ".docm"})
_OLE_MAGIC = bytes.fromhex("d0cf11e0a1b11ae1")
_ZIP_MAGIC = b"PK\x03\x04"


def extract(name: str, data: bytes, encoding: str) -> Extracted:
    """The text of the file `name` with the content `data`. Raises InputError, naming the file, where there is none."""
    if not data:
        raise InputError(f"{name}: is empty")
    suffix = PurePath(name).suffix.lower()
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n\f").lower()
    if suffix == ".pdf" or start.startswith(b"%pdf-"):
        return read_pdf(name, data)
    if data.startswith(_OLE_MAGIC):
        raise InputError(f"{name}: is a Word 97 or a password-protected Office file: save it as .docx, unprotected")
    if suffix in _WORD_SUFFIXES or (data.startswith(_ZIP_MAGIC) and b"word/document.xml" in data):
        return read_word(name, data)
    if suffix in _HTML_SUFFIXES or (not suffix and start.startswith((b"<!doctype html", b"<html"))):
        return read_html(name, data, encoding)
    return read_plain(name, data, encoding)
