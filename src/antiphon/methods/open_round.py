"""`OpenRound`: a round whose queries come one after another, while the driver writes its turn, or all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from antiphon.events import Event, EventSink, RoundStarted
from antiphon.methods.backend import Corpus, Round, ScatterOptions
from antiphon.methods.findings import FindingReader, RoundFindings, merge_rounds
from antiphon.scheduler.trace import Trace, traced


@dataclass(frozen=True)
class Gathered:
    """What a round found, what it cost, and `relevance[query][shard]`. `seconds` is from its first query's scatter to
    its last reply, on a corpus that is read by then."""

    found: RoundFindings
    relevance: tuple[tuple[float | None, ...], ...]
    seconds: float
    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int


@dataclass(frozen=True)
class _Part:
    """One scatter: the round's queries from `first_query` on. `started` is `time.perf_counter()`'s."""

    first_query: int
    started: float
    done: Round
    found: RoundFindings


class OpenRound:
    """One round: queries are scattered as they are added, and gathered together, in the order in which they were added.

    The corpus may still be read: rows start when it is. Events are held back until `gather`, since before that nobody
    knows whether the round counts. Whoever opens a round closes it.
    """

    def __init__(
        self,
        corpus: asyncio.Future[Corpus],
        options: ScatterOptions,
        number: int,
        on_event: EventSink,
        trace: Trace | None = None,
    ) -> None:
        self.number = number
        self.queries: list[str] = []
        self._corpus = corpus
        self._options = options
        self._on_event = on_event
        self._trace = trace
        self._parts: list[asyncio.Task[_Part]] = []
        self._held: list[Event] = []
        self._is_told = False
        self._span = ExitStack()

    def add(self, queries: Sequence[str]) -> None:
        """Scatters these queries, as rows of this round."""
        part = self._scatter(len(self.queries), list(queries))
        self.queries += queries
        self._parts.append(asyncio.create_task(part))

    async def gather(self) -> Gathered:
        """Waits for all rows; a failure of any is raised."""
        corpus = await asyncio.shield(self._corpus)
        self._tell(RoundStarted(self.number, tuple(self.queries), len(corpus.shards)))
        parts = [await part for part in self._parts]
        first = min(part.started for part in parts)
        self._span.close()
        return Gathered(
            found=merge_rounds([part.found for part in parts]),
            relevance=self._relevance(parts, len(corpus.shards)),
            seconds=max(part.started - first + part.done.seconds for part in parts),
            prefill_tokens=sum(part.done.prefill_tokens for part in parts),
            cached_tokens=sum(part.done.cached_tokens for part in parts),
            decode_tokens=sum(part.done.decode_tokens for part in parts),
        )

    async def close(self) -> None:
        """Cancels what is still under way; when this returns, its rows have ended."""
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        self._span.close()

    async def _scatter(self, first_query: int, queries: list[str]) -> _Part:
        corpus = await asyncio.shield(self._corpus)  # a round that is cancelled leaves the reading to others
        reader = FindingReader(corpus, queries, self.number, self._emit, first_query)
        started = time.perf_counter()
        if first_query == 0:
            self._span.enter_context(traced(self._trace, "rounds", f"round {self.number}"))
        with traced(self._trace, "queries", "; ".join(queries)):
            done = await corpus.scatter(queries, self._options, reader.row_finished, joins=first_query > 0)
        return _Part(first_query, started, done, reader.gather(done.replies))

    def _emit(self, event: Event) -> None:
        if self._is_told:
            self._on_event(event)
        else:
            self._held.append(event)

    def _tell(self, started: RoundStarted) -> None:
        self._is_told = True
        for event in (started, *self._held):
            self._on_event(event)

    def _relevance(self, parts: Sequence[_Part], num_shards: int) -> tuple[tuple[float | None, ...], ...]:
        values: list[list[float | None]] = [[None] * num_shards for _ in self.queries]
        for part in parts:
            for reply in part.done.replies:
                values[part.first_query + reply.query][reply.shard] = reply.relevance
        return tuple(map(tuple, values))
