"""PDF: the text layer, page by page."""

from __future__ import annotations

import re
from io import BytesIO
from itertools import accumulate

from pypdf import PasswordType, PdfReader

from antiphon.engine.errors import InputError
from antiphon.readers.extracted import Extracted, normalise_text

MAX_PAGES = 100_000
MAX_CHARACTERS = 1 << 29

# pypdf gives these for glyphs that the file's fonts do not map to a character.
_UNMAPPED = re.compile("[\0\ud800-\udfff]")


def read_pdf(name: str, data: bytes) -> Extracted:
    """The text of all pages, joined by newlines, with the offset at which each page starts.

    A glyph without a character becomes U+FFFD. Raises InputError for a file that is damaged, needs a password, or has
    no text at all (scanned); pages without text in a file with text are noted.
    """
    try:
        pages = [normalise_text(name, _UNMAPPED.sub("\ufffd", page)) for page in _extract_pages(name, data)]
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}: can't be read as PDF ({type(error).__name__}: {error})") from error
    blank = [number for number, page in enumerate(pages, start=1) if not page.strip()]
    if len(blank) == len(pages):
        raise InputError(
            f"{name}: none of its {len(pages)} pages has extractable text: it is likely scanned; "
            "run optical character recognition (for example ocrmypdf) first"
        )
    page_starts = tuple(accumulate((len(page) + 1 for page in pages[:-1]), initial=0))
    return Extracted("\n".join(pages), page_starts, _note_blank(name, blank, len(pages)))


def _extract_pages(name: str, data: bytes) -> list[str]:
    reader = PdfReader(BytesIO(data))
    if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
        raise InputError(f"{name}: is encrypted and needs a password: save a copy without one")
    if len(reader.pages) > MAX_PAGES:
        raise InputError(f"{name}: has {len(reader.pages)} pages, more than the {MAX_PAGES} that are read: split it")
    pages: list[str] = []
    num_characters = 0
    for page in reader.pages:
        pages.append(page.extract_text())
        num_characters += len(pages[-1])
        if num_characters > MAX_CHARACTERS:
            raise InputError(f"{name}: holds more than the {MAX_CHARACTERS} characters that are read: split it")
    return pages


def _note_blank(name: str, blank: list[int], num_pages: int) -> tuple[str, ...]:
    if not blank:
        return ()
    listed = ", ".join(map(str, blank[:8])) + (", …" if len(blank) > 8 else "")
    return (f"{name}: {len(blank)} of {num_pages} pages have no extractable text (page {listed})",)
