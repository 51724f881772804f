"""`QuotedText`: the tokens that a reply is likely to quote, looked up by the reply's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# One token alone matches too much; a match longer than this is not told apart from longer ones.
MIN_MATCH_TOKENS = 2
MAX_MATCH_TOKENS = 8


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a place whose last `match_tokens` tokens are those of the reply."""

    match_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class QuotedText:
    """A text's tokens. The index is made at the first look-up, and shared by all rows that are given this object."""

    token_ids: Sequence[int]

    @cached_property
    def _ends(self) -> dict[tuple[int, int], list[int]]:
        """Each pair of neighbouring tokens: the places behind it."""
        ends: dict[tuple[int, int], list[int]] = {}
        for end in range(MIN_MATCH_TOKENS, len(self.token_ids)):
            ends.setdefault((self.token_ids[end - 2], self.token_ids[end - 1]), []).append(end)
        return ends

    def continuation(self, written: Sequence[int], max_tokens: int) -> Continuation | None:
        """What follows the longest match of the last tokens of `written`, at most `max_tokens`; of equal matches the
        first in the text. None where not even two tokens match, or nothing is to follow."""
        if len(written) < MIN_MATCH_TOKENS or max_tokens < 1:
            return None
        best_end, best_length = 0, 0
        for end in self._ends.get((written[-2], written[-1]), ()):
            length = self._match_tokens(written, end)
            if length > best_length:
                best_end, best_length = end, length
        if not best_length:
            return None
        return Continuation(best_length, tuple(self.token_ids[best_end : best_end + max_tokens]))

    def _match_tokens(self, written: Sequence[int], end: int) -> int:
        most = min(len(written), end, MAX_MATCH_TOKENS)
        length = MIN_MATCH_TOKENS
        while length < most and self.token_ids[end - length - 1] == written[-length - 1]:
            length += 1
        return length
