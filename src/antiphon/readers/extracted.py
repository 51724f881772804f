"""What every reader returns, and the normal form in which all text is kept."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from antiphon.engine.errors import InputError

MAX_COMBINING_RUN = 256

# Combining marks are never \w, so every long run of them lies inside a match of this, which is then looked at closely.
_MARK_RUN = re.compile(rf"[^\w\s\x00-\u02ff]{{{MAX_COMBINING_RUN + 1},}}")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Extracted:
    """A file's text in normal form; `page_starts` are the offsets at which its pages begin, where it has pages.

    `notes` say what is missing from the text although the file could be read.
    """

    text: str
    page_starts: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


def normalise_text(name: str, text: str) -> str:
    """`text` with every line ending as one newline (as Python's `open` does) and in Unicode's NFC, in linear time.

    Raises InputError, naming `name`, for NUL characters, lone surrogates (no tokenizer takes them) and absurd runs of
    combining marks.
    """
    check_characters(name, text)
    return to_nfc(name, text.replace("\r\n", "\n").replace("\r", "\n"))


def check_characters(name: str, text: str) -> None:
    """Raises InputError, naming `name`, for what stands in no text: NUL characters, lone surrogates."""
    nul = text.find("\0")
    if nul >= 0:
        raise InputError(
            f"{name}: character {nul} is NUL, so this is a binary file and not text "
            "(if it is UTF-16 or UTF-32 without a byte order mark, name it: --encoding utf-16-le)"
        )
    if found := _SURROGATE.search(text):
        raise InputError(f"{name}: character {found.start()} is half of a surrogate pair, which is not text")


def to_nfc(name: str, text: str) -> str:
    """`text` in NFC. Raises InputError for a run of over 256 combining marks: ordering one takes quadratic time."""
    if text.isascii():
        return text
    for found in _MARK_RUN.finditer(text):
        run = 0
        for offset in range(found.start(), found.end()):
            run = run + 1 if unicodedata.combining(text[offset]) else 0
            if run > MAX_COMBINING_RUN:
                raise InputError(f"{name}: over {MAX_COMBINING_RUN} combining marks in a row up to character {offset}")
    return unicodedata.normalize("NFC", text)
