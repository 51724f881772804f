"""Cuts a text into shards: on token boundaries that are character boundaries, where a reader would pause."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from antiphon.engine.errors import InputError

MAX_SPACE_CHARACTERS = 256
SLICE_CHARACTERS = 1 << 14

# Best cuts first: after a paragraph, a line, a sentence, a word. Each pattern is linear in the text it scans.
_CUTS = (
    re.compile(r"\n(?:[^\S\n]*\n)+"),
    re.compile(r"\n"),
    re.compile(r"[.!?…]['\"’”»)\]]{0,3}(?=\s)|[。！？｡]['\"’”」』）]{0,3}"),
    re.compile(r"\s+"),
)
_SPACE = re.compile(r"\s*")
_JOINER = "\u200d"


class OffsetTokenizer(Protocol):
    """The part of a tokenizer that sharding needs."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and for each the (start, end) of its characters; tokens within one character share offsets.

        Special-token strings are ordinary text.
        """
        ...


@dataclass(frozen=True)
class Shard:
    """A slice of a document: `text` is exactly characters `start` to `end` of the text of source number `source`.

    `index` counts the shards of the whole document.
    """

    index: int
    source: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class _Window:
    """Characters `start` to `end`, and where the tokens in it begin: -1 where a cut would split a character."""

    start: int
    end: int
    begins: list[int]

    def boundary(self, index: int) -> int | None:
        """Where token `index` begins, or None where no cut before it can part the window in two."""
        begin = self.begins[index]
        return begin if self.start < begin < self.end else None


class _TokenStream:
    """Where the tokens of a text begin, encoded one slice at a time, as far as is asked for.

    Slices end at white space where they can, so no tokenizer is given input of a size that it may be slow on.
    """

    def __init__(self, text: str, text_end: int, tokenizer: OffsetTokenizer) -> None:
        self._text = text
        self._text_end = text_end
        self._tokenizer = tokenizer
        self._begins: list[int] = []
        self._encoded_end = 0

    def window(self, start: int, num_tokens: int) -> _Window:
        """The text from `start` on, as far as it is encoded: to at least `num_tokens` tokens or the end of the text.

        `start` only ever goes up. Token 0 is the one that holds the character `start`.
        """
        if start >= self._encoded_end:
            self._begins.clear()
            self._encoded_end = start
        past = next((index for index, begin in enumerate(self._begins) if begin > start), len(self._begins))
        del self._begins[: max(0, past - 1)]
        while len(self._begins) < num_tokens and self._encoded_end < self._text_end:
            end = self._slice_end()
            self._begins += _token_begins(self._text, self._encoded_end, end, self._tokenizer)
            self._encoded_end = end
        return _Window(start, self._encoded_end, self._begins)

    def _slice_end(self) -> int:
        end = min(self._encoded_end + SLICE_CHARACTERS, self._text_end)
        if end == self._text_end:
            return end
        middle = self._encoded_end + SLICE_CHARACTERS // 2
        space = max(self._text.rfind(" ", middle, end), self._text.rfind("\n", middle, end))
        return space if space > 0 else end


def check_shard_size(shard_tokens: int, shard_overlap: int) -> None:
    """Raises InputError unless a shard holds a token and the overlap is less than half of a shard."""
    if shard_tokens < 1:
        raise InputError(f"shards of {shard_tokens} tokens were asked for: --shard-tokens must be at least 1")
    if shard_overlap < 0 or 2 * shard_overlap >= shard_tokens:
        raise InputError(
            f"an overlap of {shard_overlap} tokens was asked for with shards of {shard_tokens}: --shard-overlap must "
            "be at least 0 and less than half of --shard-tokens"
        )


def cut_text(
    text: str, tokenizer: OffsetTokenizer, shard_tokens: int, shard_overlap: int = 0
) -> Iterator[tuple[int, int]]:
    """Yields the (start, end) of each shard of `text`, in order and in linear time.

    Every shard, encoded on its own, has at most `shard_tokens` tokens. Without overlap the shards cover the text but
    for white space at the cuts (the indentation of a shard's first line stays). With overlap a shard begins at most
    `shard_overlap` tokens before the cut, counted in the tokens of the shard before. A cut is at the last end of a
    paragraph in the last quarter of the shard, else of a line, a sentence, a word, else at any token that begins a
    character. Raises InputError for sizes that can't be, and for a character with more tokens than a shard holds.
    """
    check_shard_size(shard_tokens, shard_overlap)
    text_end = len(text.rstrip())
    stream = _TokenStream(text, text_end, tokenizer)
    begin = cut = last_end = 0
    while cut < text_end:
        start = _skip_space(text, begin)
        window, next_cut = _fit(text, stream.window(start, shard_tokens + 1), tokenizer, shard_tokens)
        if window.end <= max(start, last_end):
            # White space alone, or the overlap left no room for new text: go on without an overlap.
            begin = cut = max(cut, next_cut)
            continue
        yield start, window.end
        cut, last_end = next_cut, window.end
        begin = _overlap_start(window, shard_overlap, cut) if shard_overlap else cut


def _fit(text: str, ahead: _Window, tokenizer: OffsetTokenizer, shard_tokens: int) -> tuple[_Window, int]:
    """The shard at the start of `ahead`, as a window of at most `shard_tokens` tokens, and where the next text begins.

    A text has other tokens on its own than amid the text around it, so each cut is tried, and cut again if need be.
    """
    window, cut = ahead, ahead.end
    while True:
        if len(window.begins) > shard_tokens:
            cut = _choose_cut(text, window, shard_tokens)
        end = window.start + len(text[window.start : cut].rstrip())
        window = _Window(window.start, end, _token_begins(text, window.start, end, tokenizer))
        if len(window.begins) <= shard_tokens:
            return window, cut


def _token_begins(text: str, start: int, end: int, tokenizer: OffsetTokenizer) -> list[int]:
    """Where each token of text[start:end], encoded on its own, begins; -1 for one that begins inside a character."""
    if start == end:
        return []
    begins: list[int] = []
    last_end = 0
    for token_start, token_end in tokenizer.encode_with_offsets(text[start:end])[1]:
        begins.append(start + token_start if token_start >= last_end else -1)
        last_end = token_end
    return begins


def _choose_cut(text: str, window: _Window, shard_tokens: int) -> int:
    """The best place to cut a window of more than `shard_tokens` tokens: `window.start` < cut < `window.end`."""
    first = max(1, shard_tokens - shard_tokens // 4)
    found = [window.boundary(index) for index in range(first, shard_tokens + 1)]
    boundaries = [boundary for boundary in found if boundary is not None]
    if not boundaries:
        return _cut_before(text, window, first, shard_tokens)
    for pattern in _CUTS:
        ends = [match.end() for match in pattern.finditer(text, max(window.start, boundaries[0] - 2), boundaries[-1])]
        for end in reversed(ends):
            cut = _snap(text, boundaries, end)
            if cut is not None:
                return cut
    return next((cut for cut in reversed(boundaries) if not _inside_cluster(text, cut)), boundaries[-1])


def _cut_before(text: str, window: _Window, first: int, shard_tokens: int) -> int:
    for index in range(first - 1, 0, -1):
        cut = window.boundary(index)
        if cut is not None:
            return cut
    raise InputError(
        f"the character {text[window.start]!r} alone takes more tokens than a shard of {shard_tokens} holds: "
        "raise --shard-tokens (16 is enough for any character)"
    )


def _snap(text: str, boundaries: list[int], end: int) -> int | None:
    """The boundary at `end`, or one with only white space between: white space at a cut is dropped anyway."""
    # The last boundary up to `end` comes first: from the one after it on, a line would lack its indentation.
    index = bisect_right(boundaries, end)
    for boundary in boundaries[max(0, index - 1) : index + 1]:
        low, high = min(boundary, end), max(boundary, end)
        if low == high or (high - low <= MAX_SPACE_CHARACTERS and text[low:high].isspace()):
            return boundary
    return None


def _inside_cluster(text: str, cut: int) -> bool:
    """Whether a cut would part a mark, a variation selector or an emoji's tail from what it belongs to."""
    after = text[cut]
    is_tail = unicodedata.category(after) in ("Mn", "Me", "Mc") or after == _JOINER or "🏻" <= after <= "🏿"
    return is_tail or text[cut - 1] == _JOINER


def _skip_space(text: str, position: int) -> int:
    """Where the text after `position` begins: past blank lines and spaces, but not past a line's own indentation."""
    found = _SPACE.match(text, position)
    stop = found.end() if found else position
    line_start = text.rfind("\n", position, stop) + 1
    if line_start == 0 and (position == 0 or text[position - 1] == "\n"):
        line_start = position
    elif line_start == 0:
        return stop
    # White space without end is no indentation: it would fill shards.
    return line_start if stop - line_start <= MAX_SPACE_CHARACTERS else stop


def _overlap_start(window: _Window, shard_overlap: int, cut: int) -> int:
    num_tokens = len(window.begins)
    for index in range(max(1, num_tokens - shard_overlap), num_tokens):
        boundary = window.boundary(index)
        if boundary is not None:
            return boundary
    return cut
