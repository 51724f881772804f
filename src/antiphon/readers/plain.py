"""Plain text of any kind (Markdown, source code, logs): the encoding is declared or named, never guessed."""

from __future__ import annotations

import codecs
import re

from antiphon.engine.errors import InputError
from antiphon.readers.extracted import Extracted, normalise_text

SNIFFED_CHARACTERS = 1 << 16
MAX_CONTROL_SHARE = 0.10

# The marks of UTF-32 come first: the little-endian one begins with UTF-16's.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Tab, newlines, form feed, backspace and escape (colours in logs) occur in real text; NUL is always an error.
_CONTROL = re.compile("[\x01-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")


def read_plain(name: str, data: bytes, encoding: str) -> Extracted:
    """The text of `data`, as it stands. Raises InputError where it is binary, blank or in another encoding."""
    text = normalise_text(name, decode(name, data, encoding))
    if not text.strip():
        raise InputError(f"{name}: holds only white space: there is nothing to read")
    return Extracted(text)


def decode(name: str, data: bytes, encoding: str) -> str:
    """`data` as characters: by its byte order mark if it has one, else strictly by `encoding`.

    Raises InputError with the byte offset where the bytes are not in that encoding, and for binary data.
    """
    used = next((codec for mark, codec in _BYTE_ORDER_MARKS if data.startswith(mark)), encoding)
    try:
        text = data.decode(used)
    except UnicodeDecodeError as error:
        if b"\0" in data and used == encoding:
            raise InputError(f"{name}: byte {data.index(0)} is NUL: a binary file, or not in {used}") from error
        raise InputError(
            f"{name}: the byte at offset {error.start} is not {used} ({error.reason}); "
            "name the file's encoding with --encoding, for example --encoding cp1252"
        ) from error
    except UnicodeError as error:
        raise InputError(f"{name}: is not {used} ({error}); name the file's encoding with --encoding") from error
    _refuse_binary(name, text)
    return text.removeprefix("\ufeff")


def check_encoding(encoding: str) -> None:
    """Raises InputError unless `encoding` names a text encoding that Python knows."""
    try:
        b"\0\0".decode(encoding)
    except UnicodeDecodeError:
        return
    except (LookupError, ValueError) as error:
        raise InputError(
            f"unknown text encoding {encoding!r}: --encoding takes names such as utf-8, cp1252, shift_jis or utf-16-le"
        ) from error


def _refuse_binary(name: str, text: str) -> None:
    sample = text[:SNIFFED_CHARACTERS]
    num_controls = len(_CONTROL.findall(sample))
    if num_controls > MAX_CONTROL_SHARE * len(sample):
        raise InputError(
            f"{name}: {num_controls} of its first {len(sample)} characters are control characters: "
            "this is a binary file and not text, or not in the encoding named"
        )
