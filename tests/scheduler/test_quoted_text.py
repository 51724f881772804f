"""The longest match of a reply's last tokens is found, and what follows it; checked against a search of every place."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from antiphon.scheduler.quoted_text import MAX_MATCH_TOKENS, Continuation, QuotedText

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def searched(text: Sequence[int], written: Sequence[int], max_tokens: int) -> Continuation | None:
    for length in range(min(MAX_MATCH_TOKENS, len(written)), 1, -1):
        for end in range(length, len(text)):
            if list(text[end - length : end]) == list(written[len(written) - length :]) and max_tokens > 0:
                return Continuation(length, tuple(text[end : end + max_tokens]))
    return None


@given(TOKENS, TOKENS, st.integers(-1, 9))
def test_the_first_of_the_longest_matches_is_found(text: list[int], written: list[int], max_tokens: int) -> None:
    assert QuotedText(text).continuation(written, max_tokens) == searched(text, written, max_tokens)


def test_a_match_needs_two_tokens_and_something_behind_it() -> None:
    text = QuotedText([5, 6, 7, 8])
    assert text.continuation([9, 5, 6], 5) == Continuation(2, (7, 8))
    assert text.continuation([5, 6, 7], 1) == Continuation(3, (8,))
    for written in ([], [6], [9, 6], [7, 8], [5, 6, 7, 8]):
        assert text.continuation(written, 5) is None
