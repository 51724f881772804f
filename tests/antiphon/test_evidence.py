"""A quote is verified only where the shard says it, and its offsets are those of the source."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.document import Document, Source
from antiphon.evidence import Location, Span, locate_quote, verify_quote
from antiphon.sharding import Shard

SHARD = "The  tower was built\nin 1889 — by “Eiffel’s” firm.\n\nIts height: 330\u00a0m. Große Straße, ﬁne."


@pytest.mark.parametrize(
    ("quote", "said", "kind"),
    [
        ("was built\nin 1889", "was built\nin 1889", "exact"),
        ("  was built \n", "was built", "exact"),
        ("was built in 1889", "was built\nin 1889", "loose"),
        ("the tower WAS", "The  tower was", "loose"),
        ('1889 - by "Eiffel\'s" firm.', "1889 — by “Eiffel’s” firm.", "loose"),
        ("firm. Its\theight: 330 M", "firm.\n\nIts height: 330\u00a0m", "loose"),
        ("GROSSE STRASSE", "Große Straße", "loose"),
        ("straße, fine", "Straße, ﬁne", "loose"),
        ("ine.", "ﬁne.", "loose"),
        ("stras", "Straß", "loose"),
        ("tow\u00ader", "tower", "loose"),
    ],
)
def test_a_quote_is_found_exactly_or_loosely_with_the_spans_own_text(quote: str, said: str, kind: str) -> None:
    span = verify_quote(quote, SHARD)
    assert span is not None
    assert (SHARD[span.start : span.end], span.kind) == (said, kind)


@pytest.mark.parametrize(
    "quote", ["", " ", "T", " T ", "\u200b\u200b", "tower is built", "thetower", "1889-by", "built in 1888"]
)
def test_what_the_shard_does_not_say_is_unverified(quote: str) -> None:
    assert verify_quote(quote, SHARD) is None


def test_the_first_occurrence_wins_and_an_exact_one_before_a_loose_one() -> None:
    assert verify_quote("ab cd", "x ab cd, ab cd") == Span(2, 7, "exact")
    assert verify_quote("ab cd", "AB CD, ab  cd, ab cd") == Span(15, 20, "exact")
    assert verify_quote("ab cd", "Ab  cD, AB CD") == Span(0, 6, "loose")


def test_a_quote_in_another_normal_form_is_found() -> None:
    assert verify_quote("cafe\u0301 au lait", "un café au lait") == Span(3, 15, "exact")


@given(
    st.text(st.sampled_from("aB ß\n\tﬁİ“’—…é中😀\u00ad"), max_size=40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([str.upper, str.lower, str.casefold, lambda text: text.replace(" ", "\n "), lambda text: text]),
)
def test_every_passage_of_a_shard_is_verified_however_it_was_respelled(text, first, second, respell) -> None:  # type: ignore[no-untyped-def]
    text = text.replace("İ", "i")
    start, end = sorted((first, second))
    quote = respell(text[start:end]).strip()
    loose = quote.replace("\u00ad", "")
    span = verify_quote(quote, text)
    if len(loose.strip()) >= 2 and "\u00ad" not in text:
        assert span is not None and 0 <= span.start < span.end <= len(text)
    if span is not None and span.kind == "exact":
        assert text[span.start : span.end] == quote


def test_megabytes_of_hostile_quote_and_shard_take_linear_time() -> None:
    seconds = []
    for length in (50_000, 200_000):
        before = time.process_time()
        assert verify_quote("ß" * (length // 2) + "!", "s" * length) is None
        assert verify_quote("a" + "\u0301\u0316" * length, "a" * length) is None
        seconds.append(time.process_time() - before)
    assert seconds[1] < 12 * seconds[0] + 0.2


def test_locations_are_offsets_and_lines_of_the_source_not_of_the_shard() -> None:
    text = "first line\nsecond line\nthe answer is here\n"
    document = Document((Source("a.txt", "x"), Source("b.txt", text)))
    shard = Shard(1, 1, 11, len(text), text[11:])
    found = locate_quote(document, shard, "ANSWER is")
    assert found == Location("b.txt", text.index("answer"), text.index(" here"), 3, None, True)
    assert text[found.start : found.end] == "answer is"


def test_an_unverified_quote_is_placed_at_the_shards_start_without_offsets() -> None:
    text = "first line\nsecond line\n"
    document = Document((Source("b.txt", text),))
    assert locate_quote(document, Shard(0, 0, 11, 22, text[11:22]), "first") == Location(
        "b.txt", -1, -1, 2, None, False
    )


def test_pages_are_given_where_the_source_has_pages() -> None:
    document = Document((Source("b.pdf", "one\n\ntwo\nthree", (0, 4, 5)),))
    shard = Shard(0, 0, 0, 14, "one\n\ntwo\nthree")
    assert [locate_quote(document, shard, quote).page for quote in ("one", "two", "THREE", "four")] == [1, 3, 3, 1]
    assert locate_quote(document, shard, "two").line is None
