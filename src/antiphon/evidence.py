"""Grounding: looks a finding's quote up in the text of its shard, and says where that is in the source."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from antiphon.document import Document
from antiphon.engine.errors import InputError
from antiphon.readers.extracted import to_nfc
from antiphon.sharding import Shard

MIN_QUOTE_CHARACTERS = 2

_TYPOGRAPHIC = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ", "'")
    | dict.fromkeys("“”„‟″«»", '"')
    | dict.fromkeys("‐‑‒–—―−", "-")
    | {"…": "..."}
    | dict.fromkeys("\u00ad\u200b\u2060\ufeff", "")
)


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` of a shard's text that match a quote: exactly, or loosely (see `verify_quote`)."""

    start: int
    end: int
    kind: Literal["exact", "loose"]


@dataclass(frozen=True)
class Location:
    """Where a quote stands: character offsets in the text of `source`, line or page.

    Unverified: `start` and `end` are -1, line and page those of the shard's start.
    """

    source: str
    start: int
    end: int
    line: int | None
    page: int | None
    verified: bool


def verify_quote(quote: str, shard_text: str) -> Span | None:
    """The first place at which the shard says what `quote` says, or None; in linear time.

    An exact match anywhere comes before a loose one. Loose: case and the length of white space do not matter,
    typographic quotes and dashes equal ASCII's, invisible characters (soft hyphens, zero-width spaces) are nothing. A
    loose span is the smallest span of whole characters that holds the quote (an "ﬁ" counts as "fi"). Quotes of fewer
    than two characters are never verified.
    """
    try:
        wanted = to_nfc("quote", quote.strip())
    except InputError:
        return None
    if len(wanted) < MIN_QUOTE_CHARACTERS:
        return None
    start = shard_text.find(wanted)
    if start >= 0:
        return Span(start, start + len(wanted), "exact")
    folded_quote = _fold(wanted)[0].strip()
    if len(folded_quote) < MIN_QUOTE_CHARACTERS:
        return None
    folded, origin = _fold(shard_text)
    start = folded.find(folded_quote)
    if start < 0:
        return None
    return Span(origin[start], origin[start + len(folded_quote) - 1] + 1, "loose")


def locate_quote(document: Document, shard: Shard, quote: str) -> Location:
    """Where `quote`, said of `shard`, stands in the document (`shard` is one of its shards)."""
    source = document.sources[shard.source]
    span = verify_quote(quote, shard.text)
    start = shard.start + span.start if span else -1
    end = shard.start + span.end if span else -1
    line, page = source.locate(start if span else shard.start)
    return Location(source.name, start, end, line, page, verified=span is not None)


def _fold(text: str) -> tuple[str, array[int]]:
    """The loose form of `text`, and for each of its characters the offset in `text` of the one it came from.

    Characters are folded one at a time, since folding may lengthen them (ß is ss) and so shift all that follows.
    """
    folded: list[str] = []
    origin = array("q")
    after_space = False
    for offset, character in enumerate(text):
        if character.isspace():
            pieces = "" if after_space else " "
            after_space = True
        else:
            pieces = character.translate(_TYPOGRAPHIC).casefold()
            after_space = after_space and not pieces
        for piece in pieces:
            folded.append(piece)
            origin.append(offset)
    return "".join(folded), origin
