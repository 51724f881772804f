"""Promises of findings: grounded where they can be, merged where they repeat, counted where they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from antiphon.document import Document, Source
from antiphon.events import Event, FindingFound, RowFinished
from antiphon.methods.backend import Round, ScatterOptions
from antiphon.methods.findings import FindingReader, merge_findings, normalised
from antiphon.results import Evidence
from antiphon.sharding import Shard

TEXT = "The ship sailed in 1902.\nMary Holm was born in Bergen.\nShe painted ships.\n"
CUTS = [(0, 25), (25, 55), (55, len(TEXT))]


@dataclass(frozen=True)
class Reply:
    shard: int
    query: int
    text: str
    finish_reason: str = "stop"
    abstained: bool = False
    relevance: float | None = None


@dataclass
class TextCorpus:
    """Three shards, one a line."""

    document: Document = field(default_factory=lambda: Document((Source("book.txt", TEXT),)))
    document_tokens: int = 20

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(Shard(index, 0, *cut, TEXT[slice(*cut)]) for index, cut in enumerate(CUTS))

    async def scatter(self, queries: Sequence[str], options: ScatterOptions, on_row: Callable[[Any], None]) -> Round:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError


def found(evidence: str, answer: str) -> str:
    return f'{{"evidence":"{evidence}","answer":"{answer}"}}'


REPLIES = [
    Reply(0, 0, "Unknown", abstained=True),
    Reply(1, 0, found("Mary Holm was born in Bergen.", "Bergen"), relevance=0.5),
    Reply(2, 0, found("She was born in Oslo.", "Oslo"), relevance=0.9),
    Reply(0, 1, found("sailed  in\\n1902", "1902")),
    Reply(1, 1, '{"evidence":"The shi', "length"),
    Reply(2, 1, "Unknown."),
]


def reader(events: list[Event] | None = None) -> FindingReader:
    sink = events.append if events is not None else lambda event: None
    return FindingReader(TextCorpus(), ["Where?", "When?"], 3, sink)


def test_a_finding_has_the_source_span_of_its_quote() -> None:
    evidence = reader().gather(REPLIES).for_query("Where?")[1]
    assert (evidence.source, evidence.line, evidence.verified) == ("book.txt", 2, True)
    assert TEXT[evidence.start : evidence.end] == evidence.quote == "Mary Holm was born in Bergen."
    assert (evidence.shard, evidence.query, evidence.round, evidence.relevance) == (1, "Where?", 3, 0.5)


def test_a_quote_that_differs_in_space_alone_is_verified() -> None:
    (evidence,) = reader().gather(REPLIES).for_query("When?")
    assert evidence.verified
    assert TEXT[evidence.start : evidence.end] == "sailed in 1902"


def test_a_quote_that_is_not_in_the_shard_is_marked_and_kept() -> None:
    evidence = reader().gather(REPLIES).for_query("Where?")[0]
    assert (evidence.answer, evidence.verified, evidence.start, evidence.end) == ("Oslo", False, -1, -1)


def test_a_quote_from_another_shard_is_not_verified() -> None:
    (evidence,) = reader().gather([Reply(0, 0, found("Mary Holm was born in Bergen.", "Bergen"))]).evidence
    assert not evidence.verified


def test_abstentions_and_malformed_replies_are_counted_apart() -> None:
    result = reader().gather(REPLIES)
    assert (len(result.evidence), result.num_abstentions, result.num_malformed) == (3, 2, 1)


def test_rows_are_told_as_they_end_and_gathered_the_same() -> None:
    events: list[Event] = []
    watched = reader(events)
    for reply in REPLIES:
        watched.row_finished(reply)
    rows = [event for event in events if isinstance(event, RowFinished)]
    assert [(row.query, row.shard, row.abstained) for row in rows[:2]] == [(0, 0, True), (0, 1, False)]
    assert [row.abstained for row in rows] == [True, False, False, False, False, True]
    assert sum(isinstance(event, FindingFound) for event in events) == 3
    assert watched.gather(REPLIES) == reader().gather(REPLIES)


ONE = Evidence("a.txt", 10, 20, 1, None, "Born in Bergen", "Bergen", True, None, 0, "Where?", 1)


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, shard=1),
        replace(ONE, shard=1, verified=False, start=-1, end=-1),
        replace(ONE, shard=1, quote="born  in BERGEN.", answer="bergen.", start=40, end=50),
        replace(ONE, shard=1, quote="in Bergen", start=19, end=30),
    ],
)
def test_a_finding_that_repeats_another_is_merged_into_the_better(other: Evidence) -> None:
    assert merge_findings([other, ONE]) == (ONE,)


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, query="When?"),
        replace(ONE, shard=1, answer="Oslo"),
        replace(ONE, shard=1, quote="in Bergen", start=20, end=30),
        replace(ONE, shard=1, quote="in Bergen", source="b.txt"),
        replace(ONE, shard=1, quote="in Bergen", verified=False, start=-1, end=-1),
    ],
)
def test_what_differs_in_query_answer_or_place_is_kept(other: Evidence) -> None:
    assert set(merge_findings([other, ONE])) == {ONE, other}


def test_findings_come_most_relevant_first_then_verified_then_in_document_order() -> None:
    low, high = replace(ONE, relevance=0.1, answer="a"), replace(ONE, relevance=0.9, answer="b")
    assert merge_findings([low, high]) == (high, low)
    late, early = replace(ONE, shard=5, answer="a"), replace(ONE, shard=2, answer="b")
    unsure = replace(ONE, shard=0, verified=False, answer="c")
    assert merge_findings([unsure, late, early]) == (early, late, unsure)


def test_normalised_ignores_case_space_and_end_punctuation() -> None:
    assert normalised(" Who  wrote\nIt? ") == normalised("who wrote it")
    assert normalised("3.5") != normalised("35")
