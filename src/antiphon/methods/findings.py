"""From a round's replies to its findings: parsed, looked up in the shard, duplicates merged, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.events import EventSink, FindingFound, RowFinished
from antiphon.evidence import locate_quote
from antiphon.methods.backend import Corpus, WorkerReply
from antiphon.methods.worker_reply import Abstention, Finding, Malformed, parse_reply
from antiphon.results import Evidence


@dataclass(frozen=True)
class RoundFindings:
    """What a round found: merged evidence, best first, and how many rows abstained or failed."""

    evidence: tuple[Evidence, ...]
    num_abstentions: int
    num_malformed: int

    def for_query(self, query: str) -> tuple[Evidence, ...]:
        """The findings of one query, best first."""
        return tuple(item for item in self.evidence if item.query == query)


class FindingReader:
    """Reads the rows of one scatter: a round, or (`queries` are its queries from `first_query` on) a part of one.
    `row_finished` may be called while it runs, for its events."""

    def __init__(
        self, corpus: Corpus, queries: Sequence[str], round_number: int, on_event: EventSink, first_query: int = 0
    ) -> None:
        self._corpus = corpus
        self._queries = queries
        self._round_number = round_number
        self._on_event = on_event
        self._first_query = first_query
        self._read: dict[tuple[int, int, str], Evidence | Abstention | Malformed] = {}

    def row_finished(self, reply: WorkerReply) -> None:
        """Emit the events of one row, and remember its outcome."""
        outcome = self._outcome(reply)
        abstained = isinstance(outcome, Abstention)
        query = self._first_query + reply.query
        self._on_event(RowFinished(self._round_number, query, reply.shard, abstained))
        if isinstance(outcome, Evidence):
            self._on_event(FindingFound(outcome))

    def gather(self, replies: Sequence[WorkerReply]) -> RoundFindings:
        """The findings of all rows, whether or not `row_finished` saw them."""
        outcomes = [self._outcome(reply) for reply in replies]
        return RoundFindings(
            evidence=merge_findings([outcome for outcome in outcomes if isinstance(outcome, Evidence)]),
            num_abstentions=sum(isinstance(outcome, Abstention) for outcome in outcomes),
            num_malformed=sum(isinstance(outcome, Malformed) for outcome in outcomes),
        )

    def _outcome(self, reply: WorkerReply) -> Evidence | Abstention | Malformed:
        key = (reply.query, reply.shard, reply.text)
        if key not in self._read:
            parsed = Abstention() if reply.abstained else parse_reply(reply.text, reply.finish_reason)
            self._read[key] = self._ground(parsed, reply) if isinstance(parsed, Finding) else parsed
        return self._read[key]

    def _ground(self, finding: Finding, reply: WorkerReply) -> Evidence:
        location = locate_quote(self._corpus.document, self._corpus.shards[reply.shard], finding.evidence)
        return Evidence(
            source=location.source,
            start=location.start,
            end=location.end,
            line=location.line,
            page=location.page,
            quote=finding.evidence,
            answer=finding.answer,
            verified=location.verified,
            relevance=reply.relevance,
            shard=reply.shard,
            query=self._queries[reply.query],
            round=self._round_number,
        )


def merge_rounds(parts: Sequence[RoundFindings]) -> RoundFindings:
    """What the parts of one round found, as if they had been one scatter."""
    return RoundFindings(
        evidence=merge_findings([item for part in parts for item in part.evidence]),
        num_abstentions=sum(part.num_abstentions for part in parts),
        num_malformed=sum(part.num_malformed for part in parts),
    )


def merge_findings(findings: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """Drop findings that repeat a better one: same query and answer, and the same quote or an overlapping span.

    Spans overlap where shards do. Best is most relevant where relevance was measured, then verified, then first in
    the document; the result has that order. Of two that repeat each other a verified one stays.
    """
    kept: dict[tuple[str, str], list[Evidence]] = {}
    for finding in sorted(findings, key=lambda item: (not item.verified, *_rank(item))):
        same_answer = kept.setdefault((finding.query, normalised(finding.answer)), [])
        if not any(_repeats(finding, other) for other in same_answer):
            same_answer.append(finding)
    return tuple(sorted((item for group in kept.values() for item in group), key=_rank))


def normalised(text: str) -> str:
    """`text` without differences of case, space and punctuation at its ends."""
    return " ".join(text.casefold().split()).strip(" .,;:!?\"'`")


def _rank(finding: Evidence) -> tuple[bool, float, bool, int]:
    relevance = finding.relevance
    return (relevance is None, -(relevance or 0.0), not finding.verified, finding.shard)


def _repeats(finding: Evidence, other: Evidence) -> bool:
    if normalised(finding.quote) == normalised(other.quote):
        return True
    both_verified = finding.verified and other.verified and finding.source == other.source
    return both_verified and finding.start < other.end and other.start < finding.end
