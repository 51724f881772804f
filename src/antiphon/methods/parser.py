"""Step 2 of the reading path: ParSer, who asks. Before it: `document.py`, the shards. After it: `scheduler/round.py`.

    history = [system prompt with the tool, question]          never the document
    up to 12 turns:  the driver writes a turn
        it asks       every query goes to every shard, what they found goes into the history
        it answers    done
        neither       a hint that the action was invalid goes into the history
    turns run out, or the driver's context is full: one last turn that must answer

After arXiv 2609.06702. Ours, where the paper is silent: the first turn must ask (`query_first`), a query asked before
is answered from what was found then, the hint is a tool result, and the last turn is forced.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from antiphon.document import Document
from antiphon.engine.errors import InputError
from antiphon.events import Answered, DriverTurn, EventSink, RoundFinished, RoundStarted, ignore_event
from antiphon.methods.backend import Corpus, Engine, Round, ScatterOptions
from antiphon.methods.conversation import Conversation
from antiphon.methods.driver_turn import FinalAnswer, Invalid, Queries, classify_turn, extract_answer, spoken_text
from antiphon.methods.findings import FindingReader, normalised
from antiphon.methods.observation import observation, split_budget
from antiphon.methods.options import ParSerOptions
from antiphon.methods.prompts import ParSerPrompts
from antiphon.results import Answer, Evidence, RoundRecord

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
            corpus = await self.register(text, on_event)
            answer.seconds.read = time.perf_counter() - started
            answer.usage.worker_prefill_tokens = corpus.prefill_tokens
            try:
                await self._inquire(corpus, question, answer, on_event)
            finally:
                await corpus.release()
        else:
            await self._inquire(text, question, answer, on_event)
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

    async def _inquire(self, corpus: Corpus, question: str, answer: Answer, on_event: EventSink) -> None:
        answer.usage.shards = len(corpus.shards)
        answer.usage.document_tokens = corpus.document_tokens
        if not corpus.shards:
            return
        conversation = Conversation(self._engine, self.options, self.prompts, question, answer.usage)
        try:
            await _Inquiry(self.options, self.prompts, corpus, conversation, answer, on_event).run()
        finally:
            conversation.close()


@dataclass
class _Inquiry:
    """One question on its way to its answer."""

    options: ParSerOptions
    prompts: ParSerPrompts
    corpus: Corpus
    conversation: Conversation
    answer: Answer
    on_event: EventSink
    # Normalised query → what was found when it was first asked.
    asked: dict[str, tuple[Evidence, ...]] = field(default_factory=dict)

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
        turn = await self.conversation.turn("query" if must_query else "query-or-answer")
        self.answer.seconds.driver += turn.seconds
        self.on_event(DriverTurn(number, turn.text, turn.seconds))
        action = classify_turn(turn.text, finish_reason=turn.finish_reason, in_thinking=turn.in_thinking)
        if must_query and isinstance(action, FinalAnswer):
            return Invalid(self.prompts.ask_first)
        return action

    async def _ask_shards(self, queries: Sequence[str]) -> bool:
        """Scatter the queries not asked before, and give the driver the findings of all. Whether any was new."""
        made, dropped = queries[: self.options.max_queries], queries[self.options.max_queries :]
        fresh: dict[str, str] = {}
        for query in made:
            if normalised(query) not in self.asked:
                fresh.setdefault(normalised(query), query)
        if fresh:
            await self._scatter(list(fresh.values()))
        results = self._observations(made, fresh)
        if dropped:
            results.append(self.prompts.too_many.format(max_queries=self.options.max_queries))
        self.conversation.add_results(results)
        return bool(fresh)

    async def _scatter(self, queries: list[str]) -> None:
        number = len(self.answer.rounds) + 1
        self.on_event(RoundStarted(number, tuple(queries), len(self.corpus.shards)))
        reader = FindingReader(self.corpus, queries, number, self.on_event)
        done = await self.corpus.scatter(queries, self._scatter_options(), reader.row_finished)
        found = reader.gather(done.replies)
        for query in queries:
            self.asked[normalised(query)] = found.for_query(query)
        usage = self.answer.usage
        usage.worker_prefill_tokens += done.prefill_tokens
        usage.worker_cached_tokens += done.cached_tokens
        usage.worker_decode_tokens += done.decode_tokens
        self.answer.seconds.rounds += done.seconds
        self.answer.evidence.extend(found.evidence)
        relevance = self._relevance(len(queries), done)
        record = RoundRecord(tuple(queries), len(found.evidence), found.num_abstentions, done.seconds, relevance)
        self.answer.rounds.append(record)
        if found.num_malformed:
            self.answer.notes.append(f"round {number}: {found.num_malformed} malformed worker replies were dropped")
        self.on_event(RoundFinished(number, record.findings, record.abstentions, record.seconds))

    def _relevance(self, num_queries: int, done: Round) -> tuple[tuple[float | None, ...], ...]:
        values: list[list[float | None]] = [[None] * len(self.corpus.shards) for _ in range(num_queries)]
        for reply in done.replies:
            values[reply.query][reply.shard] = reply.relevance
        return tuple(map(tuple, values))

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
                num_shards=len(self.corpus.shards),
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
