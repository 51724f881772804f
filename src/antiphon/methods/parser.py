"""Step 2 of the reading path: ParSer, who asks. Before it: `document.py`, the shards. After it: `scheduler/round.py`.

    history = [system prompt with the tool, question]          never the document
    up to 12 turns:  the driver writes a turn
        it asks       every query goes to every shard, what they found goes into the history
        it answers    done
        neither       a hint that the action was invalid goes into the history
    turns run out, or the driver's context is full: one last turn that must answer

With `overlap` the document is read beside the first turn, and a query goes to the shards while the driver writes on.

After arXiv 2609.06702. Ours, where the paper is silent: the first turn must ask (`query_first`), a query asked before
is answered from what was found then, the hint is a tool result, and the last turn is forced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from antiphon.document import Document
from antiphon.engine.errors import InputError
from antiphon.events import Answered, DriverTurn, EventSink, RoundFinished, ignore_event
from antiphon.methods.backend import Corpus, Engine, ScatterOptions
from antiphon.methods.conversation import Conversation
from antiphon.methods.driver_grammar import TurnKind
from antiphon.methods.driver_turn import FinalAnswer, Invalid, Queries, classify_turn, extract_answer, spoken_text
from antiphon.methods.findings import normalised
from antiphon.methods.observation import observation, split_budget
from antiphon.methods.open_round import OpenRound
from antiphon.methods.options import ParSerOptions
from antiphon.methods.prompts import ParSerPrompts
from antiphon.results import Answer, Evidence, RoundRecord
from antiphon.scheduler.trace import Trace, traced

METHOD = "parser"
NOT_FOUND = "not found in the document"


class ParSer:
    """Parallel search and reason: a driver asks, every shard's worker answers, until the driver knows."""

    def __init__(
        self, engine: Engine, options: ParSerOptions | None = None, *, prompts: ParSerPrompts | None = None
    ) -> None:
        self._engine = engine
        self.options = options or ParSerOptions()
        self.prompts = prompts or ParSerPrompts()

    async def ask(self, text: Document | Corpus, question: str, on_event: EventSink = ignore_event) -> Answer:
        """Answer one question from a corpus, or from a document, which is registered for this question only.

        `stopped` is "answered", "turns" or "context" (the answer was forced), or "no-document" (there are no shards).
        Raises `InputError` for an empty question, `CapacityError` for one that the driver's context cannot hold.
        """
        if not question.strip():
            raise InputError("the question is empty: ask something")
        started = time.perf_counter()
        answer = Answer(answer=NOT_FOUND, method=METHOD, stopped="no-document")
        if isinstance(text, Document):
            await self._read_and_inquire(text, question, answer, on_event)
        else:
            _count_shards(text, answer)
            if text.shards:
                await self._inquire(_ready(text), question, answer, on_event)
        answer.seconds.total = time.perf_counter() - started
        on_event(Answered(answer))
        return answer

    async def register(self, document: Document, on_event: EventSink = ignore_event) -> Corpus:
        """Have the workers read a document, for any number of questions; the caller releases the corpus."""
        return await self._engine.register(
            document,
            shard_tokens=self.options.shard_tokens,
            shard_overlap=self.options.shard_overlap,
            worker_instructions=self.prompts.worker_instructions,
            on_event=on_event,
        )

    async def _read_and_inquire(self, document: Document, question: str, answer: Answer, on_event: EventSink) -> None:
        """The reading and, beside it or after it, the question. Where one fails the other is cancelled, and when this
        returns nothing of either is left."""
        reading: asyncio.Task[Corpus] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(document, answer, on_event))
                if not self.options.overlap and not (await reading).shards:
                    return
                inquiry = group.create_task(self._inquire(reading, question, answer, on_event))
                if not (await reading).shards:
                    inquiry.cancel()
                    answer.answer, answer.stopped, answer.notes = NOT_FOUND, "no-document", []
        except BaseExceptionGroup as failures:  # what the first failure led to is of no interest
            raise failures.exceptions[0] from None
        finally:
            if reading is not None and reading.done() and not reading.cancelled() and reading.exception() is None:
                await reading.result().release()

    async def _read(self, document: Document, answer: Answer, on_event: EventSink) -> Corpus:
        started = time.perf_counter()
        with traced(self._engine.trace, "reading", "reading"):
            corpus = await self.register(document, on_event)
        answer.seconds.read = time.perf_counter() - started
        answer.usage.worker_prefill_tokens += corpus.prefill_tokens
        _count_shards(corpus, answer)
        return corpus

    async def _inquire(
        self, corpus: asyncio.Future[Corpus], question: str, answer: Answer, on_event: EventSink
    ) -> None:
        conversation = Conversation(self._engine, self.options, self.prompts, question, answer.usage)
        inquiry = _Inquiry(self.options, self.prompts, corpus, conversation, answer, on_event, self._engine.trace)
        try:
            await inquiry.run()
        finally:
            conversation.close()
            await inquiry.close()


@dataclass
class _Inquiry:
    """One question on its way to its answer; `corpus` may still be read."""

    options: ParSerOptions
    prompts: ParSerPrompts
    corpus: asyncio.Future[Corpus]
    conversation: Conversation
    answer: Answer
    on_event: EventSink
    trace: Trace | None
    # Normalised query → what was found when it was first asked.
    asked: dict[str, tuple[Evidence, ...]] = field(default_factory=dict)
    # The queries of the turn that is being written, and the round that they have opened.
    heard: list[str] = field(default_factory=list)
    round: OpenRound | None = None

    async def run(self) -> None:
        """Turns until one answers; `answer` holds the outcome."""
        num_repeats = 0
        for number in range(1, self.options.rounds + 1):
            if self.conversation.is_full:
                return await self._force_answer("context", number)
            action = await self._next_action(number)
            if isinstance(action, FinalAnswer):
                return self._finish(action.text, "answered")
            if isinstance(action, Invalid):
                hint = self.prompts.invalid_hint.format(reason=action.reason)
                self.conversation.add_results([hint])
                continue
            asked_anything = await self._ask_shards(action.queries)
            num_repeats = 0 if asked_anything else num_repeats + 1
            if num_repeats and num_repeats == self.options.max_repeats:
                self.answer.notes.append(f"the driver only repeated its queries for {num_repeats} turns")
                return await self._force_answer("turns", number + 1)
        await self._force_answer("turns", self.options.rounds + 1)

    async def _next_action(self, number: int) -> Queries | FinalAnswer | Invalid:
        must_query = self.options.query_first and not self.answer.rounds
        self.heard = []
        kind: TurnKind = "query" if must_query else "query-or-answer"
        turn = await self.conversation.turn(kind, self._hear if self.options.overlap else None)
        self.answer.seconds.driver += turn.seconds
        self.on_event(DriverTurn(number, turn.text, turn.seconds))
        action = classify_turn(turn.text, finish_reason=turn.finish_reason, in_thinking=turn.in_thinking)
        asked = list(self._fresh(action.queries).values()) if isinstance(action, Queries) else []
        if self.round is not None and self.round.queries != asked[: len(self.round.queries)]:
            await self.close()  # the turn as it ended is what counts
        if must_query and isinstance(action, FinalAnswer):
            return Invalid(self.prompts.ask_first)
        return action

    async def close(self) -> None:
        """Cancels the round that is open, if one is; its rows have ended when this returns."""
        opened, self.round = self.round, None
        if opened is not None:
            await opened.close()

    def _hear(self, query: str) -> None:
        """A call is complete while the driver writes on: what the turn's end would ask is asked now."""
        self.heard.append(query)
        fresh = list(self._fresh(self.heard).values())
        if fresh:
            self._scatter(fresh)

    def _scatter(self, queries: Sequence[str]) -> OpenRound:
        """Scatters those of `queries` that the open round, whose queries they begin with, does not have yet."""
        if self.round is None:
            number = len(self.answer.rounds) + 1
            self.round = OpenRound(self.corpus, self._scatter_options(), number, self.on_event, self.trace)
        new = queries[len(self.round.queries) :]
        if new:
            self.round.add(new)
        return self.round

    def _fresh(self, queries: Sequence[str]) -> dict[str, str]:
        """Of a turn's queries those that are made and were not asked before, by their normalised form."""
        fresh: dict[str, str] = {}
        for query in queries[: self.options.max_queries]:
            if normalised(query) not in self.asked:
                fresh.setdefault(normalised(query), query)
        return fresh

    async def _ask_shards(self, queries: Sequence[str]) -> bool:
        """Scatter the queries not asked before, and give the driver the findings of all. Whether any was new."""
        made, dropped = queries[: self.options.max_queries], queries[self.options.max_queries :]
        fresh = self._fresh(queries)
        if fresh:
            await self._run_round(list(fresh.values()))
        results = self._observations(made, fresh)
        if dropped:
            results.append(self.prompts.too_many.format(max_queries=self.options.max_queries))
        self.conversation.add_results(results)
        return bool(fresh)

    async def _run_round(self, queries: list[str]) -> None:
        opened = self._scatter(queries)
        done = await opened.gather()
        self.round = None
        number, found = opened.number, done.found
        for query in queries:
            self.asked[normalised(query)] = found.for_query(query)
        usage = self.answer.usage
        usage.worker_prefill_tokens += done.prefill_tokens
        usage.worker_cached_tokens += done.cached_tokens
        usage.worker_decode_tokens += done.decode_tokens
        self.answer.seconds.rounds += done.seconds
        self.answer.evidence.extend(found.evidence)
        record = RoundRecord(tuple(queries), len(found.evidence), found.num_abstentions, done.seconds, done.relevance)
        self.answer.rounds.append(record)
        if found.num_malformed:
            self.answer.notes.append(f"round {number}: {found.num_malformed} malformed worker replies were dropped")
        self.on_event(RoundFinished(number, record.findings, record.abstentions, record.seconds))

    def _scatter_options(self) -> ScatterOptions:
        options = self.options
        return ScatterOptions(
            sampling=options.worker_sampling(),
            grammar=options.reply_grammar,
            gate=options.gate,
            readers=options.readers or None,
            second_reader=options.second_reader,
        )

    def _observations(self, queries: Sequence[str], fresh: Collection[str]) -> list[str]:
        room_tokens = min(self.options.observation_tokens, self.conversation.room_tokens)
        first_time = set(fresh)
        results = []
        for query in queries:
            text = observation(
                query,
                self.asked[normalised(query)],
                num_shards=self.answer.usage.shards,
                max_tokens=split_budget(room_tokens, len(queries)),
                count_tokens=self.conversation.count_tokens,
            )
            repeated = normalised(query) not in first_time
            results.append(f"{self.prompts.repeated}\n{text}" if repeated else text)
            first_time.discard(normalised(query))
        return results

    async def _force_answer(self, stopped: str, number: int) -> None:
        turn = await self.conversation.forced_answer()
        self.answer.seconds.driver += turn.seconds
        self.on_event(DriverTurn(number, turn.text, turn.seconds))
        spoken = spoken_text(turn.text, in_thinking=turn.in_thinking)
        self._finish(extract_answer(spoken) or spoken or NOT_FOUND, stopped)

    def _finish(self, text: str, stopped: str) -> None:
        self.answer.answer = text
        self.answer.stopped = stopped
        if not self.answer.evidence:
            self.answer.notes.append("ungrounded: no shard had a finding, the answer is the driver's own")
        elif not any(item.verified for item in self.answer.evidence):
            self.answer.notes.append("no finding's quote was found word for word in its shard")


def _ready(corpus: Corpus) -> asyncio.Future[Corpus]:
    future: asyncio.Future[Corpus] = asyncio.get_running_loop().create_future()
    future.set_result(corpus)
    return future


def _count_shards(corpus: Corpus, answer: Answer) -> None:
    answer.usage.shards = len(corpus.shards)
    answer.usage.document_tokens = corpus.document_tokens
