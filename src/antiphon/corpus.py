"""`Corpus`: a document's shards, each read once and kept; every query is scattered over all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from antiphon.document import Document
from antiphon.engine.errors import CapacityError, InputError
from antiphon.engine.pages import num_pages_for
from antiphon.engine.prefix_store import Prefix
from antiphon.events import EventSink, ReadProgress
from antiphon.loaded_model import LoadedModel
from antiphon.methods.backend import ScatterOptions
from antiphon.methods.worker_reply import ABSTENTION
from antiphon.scheduler.gate import GateOptions
from antiphon.scheduler.round import RoundRequest, RoundResult, RowReply, run_round
from antiphon.scheduler.row import RowResult
from antiphon.second_reader import SecondReader
from antiphon.sharding import Shard

# Room that a row needs behind its shard: a query, and a short reply.
_ROW_TOKENS = 256


@dataclass(frozen=True)
class WorkerReply:
    """One row's outcome; `text` is empty where the gate ended the row."""

    shard: int
    query: int
    text: str
    finish_reason: str
    abstained: bool
    relevance: float | None


@dataclass(frozen=True)
class Round:
    """One scatter: the replies of all rows, its seconds, and the tokens it cost."""

    replies: tuple[WorkerReply, ...]
    seconds: float
    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int


class Corpus:
    """Registered shards. Made by `Engine.register`; gives its pages back with `release`.

    `prefill_tokens` is what reading cost; `prefix_tokens` is what every round reuses: all shards' prefix lengths.
    """

    def __init__(
        self,
        document: Document,
        shards: Sequence[Shard],
        worker: LoadedModel,
        instructions: Prefix,
        baseline: Prefix,
        reads: Sequence[RowResult],
        second_reader: SecondReader,
        prefill_tokens: int,
    ) -> None:
        self.document = document
        self.shards = tuple(shards)
        self.prefixes = tuple(result.prefix for result in reads if result.prefix is not None)
        self.prefill_tokens = prefill_tokens
        self.prefix_tokens = sum(prefix.num_tokens for prefix in self.prefixes)
        self.document_tokens = self.prefix_tokens - len(self.prefixes) * instructions.num_tokens
        self._worker = worker
        self._instructions = instructions
        self._baseline = baseline
        self._second_reader = second_reader
        self._abstain_ids = worker.first_token_ids(ABSTENTION)
        self._num_rounds = 0
        self._released = False
        worker.client.core.call(lambda: worker.client.lane.open_corpus(self, self.prefixes))

    async def scatter(
        self,
        queries: Sequence[str],
        options: ScatterOptions,
        on_row: Callable[[WorkerReply], None] = lambda reply: None,
        *,
        joins: bool = False,
    ) -> Round:
        """Asks every shard every query. `on_row` is called with a reply as soon as its row has ended. With `joins` the
        rows are as urgent as those of the scatter before, whose round they belong to."""
        if self._released:
            raise InputError("corpus: it was released, register the document again")
        if not queries or not all(query.strip() for query in queries):
            raise InputError(f"corpus: a round needs queries with words in them, got {list(queries)}")
        self._num_rounds += not joins
        request = self._request(queries, options)

        def ended(shard: int, query: int, gated: bool) -> None:
            if gated:
                on_row(WorkerReply(shard, query, "", "gated", True, None))

        started = time.perf_counter()
        result = await run_round(self._worker.client, request, ended)
        if options.second_reader:
            done = await self._read_again(queries, options, result, on_row)
            return replace(done, seconds=time.perf_counter() - started)
        replies = tuple(self._reply(reply) for reply in result.replies)
        for reply in replies:
            if not reply.abstained:
                on_row(reply)
        return Round(replies, result.seconds, result.prefill_tokens, result.cached_tokens, result.decode_tokens)

    async def release(self) -> None:
        """Gives up all prefixes. What nobody else uses is free at once."""
        if not self._released:
            self._released = True
            self._worker.client.core.call(lambda: self._worker.client.lane.close_corpus(self))
            self._worker.release([*self.prefixes, self._baseline, self._instructions])
            self._second_reader.release()

    def _request(self, queries: Sequence[str], options: ScatterOptions) -> RoundRequest:
        """The worker's rows. With a second reader they only locate: no row decodes, and the likelihood gate does not
        look at first tokens, so no grammar is needed."""
        locates = options.second_reader
        needs_grammar = options.grammar != "none" and not (locates and options.gate == "likelihood")
        return RoundRequest(
            prefixes=self.prefixes,
            suffixes=[self._worker.chat.worker_suffix(query) for query in queries],
            params=replace(options.sampling, max_new_tokens=1) if locates else options.sampling,
            gate=GateOptions(options.gate, options.readers, readers_decode=not locates),
            grammars=[options.reply_lark(shard.text) if needs_grammar else None for shard in self.shards],
            abstain_ids=self._abstain_ids if needs_grammar else (),
            baseline=self._baseline,
            order=self._num_rounds,
            corpus=self,
        )

    def _reply(self, reply: RowReply) -> WorkerReply:
        return WorkerReply(
            shard=reply.prefix_index,
            query=reply.query_index,
            text=self._worker.text(reply.token_ids),
            finish_reason=reply.finish_reason.value,
            abstained=reply.abstained or not reply.chosen,
            relevance=reply.relevance,
        )

    async def _read_again(
        self,
        queries: Sequence[str],
        options: ScatterOptions,
        first: RoundResult,
        on_row: Callable[[WorkerReply], None],
    ) -> Round:
        """The chosen shards of each query once more, by the driver's model in a worker's role."""
        chosen = [
            [reply.prefix_index for reply in first.replies if reply.query_index == query and reply.chosen]
            for query in range(len(queries))
        ]
        second = await asyncio.gather(
            *(
                self._second_reader.ask(query, [self.shards[index] for index in shards], options)
                for query, shards in zip(queries, chosen, strict=True)
            )
        )
        by_row = {
            (shards[reply.prefix_index], query): reply
            for query, (shards, result) in enumerate(zip(chosen, second, strict=True))
            for reply in result.replies
        }
        replies = []
        for reply in first.replies:
            again = by_row.get((reply.prefix_index, reply.query_index))
            text, reason, abstained = "", "gated", True
            if again is not None:
                text, reason, abstained = self._second_reader.text(again), again.finish_reason.value, again.abstained
            merged = WorkerReply(reply.prefix_index, reply.query_index, text, reason, abstained, reply.relevance)
            replies.append(merged)
            if again is not None:  # the others' rows ended with the first reader, and were told then
                on_row(merged)
        results = [first, *second]
        return Round(
            tuple(replies),
            first.seconds,
            sum(result.prefill_tokens for result in results),
            first.cached_tokens,
            sum(result.decode_tokens for result in results),
        )


async def read_corpus(
    document: Document,
    worker: LoadedModel,
    driver: LoadedModel,
    *,
    shard_tokens: int,
    shard_overlap: int,
    worker_instructions: str,
    on_event: EventSink,
    save: bool = False,
) -> Corpus:
    """Cuts a document and has the worker read every shard behind the instructions; nothing is read where it cannot
    fit the context or the pool (`InputError`, `CapacityError`). With `save` all states are in the saved tier when this
    returns; where one cannot be put there, its error (`TierError`) is raised, and what is saved stays."""
    instruction_ids = worker.chat.worker_prefix(worker_instructions)
    room_tokens = worker.max_context_tokens - len(instruction_ids) - _ROW_TOKENS
    if shard_tokens > room_tokens:
        raise InputError(
            f"shards of {shard_tokens} tokens do not fit {worker.name}: its context of {worker.max_context_tokens} "
            f"tokens leaves {max(0, room_tokens)} beside instructions, query and reply. Lower --shard-tokens."
        )
    shards = await asyncio.to_thread(document.sharded, worker.tokenizer, shard_tokens, shard_overlap)
    texts = [worker.chat.shard_tokens(shard.text) for shard in shards]
    _check_pool(worker, len(instruction_ids), texts)
    second_reader = SecondReader(driver, worker_instructions)
    instructions, num_computed = await worker.read_counted(instruction_ids)
    done_shards = done_tokens = 0
    total_tokens = sum(map(len, texts))

    def read(index: int, result: RowResult) -> None:
        nonlocal done_shards, done_tokens
        done_shards += 1
        done_tokens += len(texts[index])
        on_event(ReadProgress(done_shards, len(texts), done_tokens, total_tokens))

    try:
        baseline, num_more = await worker.read_counted(worker.chat.shard_tokens(""), instructions)
        num_computed += num_more
        try:
            reads = await worker.read_all(texts, instructions, read, save=save)
        except BaseException:
            worker.release([baseline])
            raise
    except BaseException:
        worker.release([instructions])
        raise
    corpus = Corpus(
        document,
        shards,
        worker,
        instructions,
        baseline,
        reads,
        second_reader,
        num_computed + sum(result.prefill_tokens for result in reads),
    )
    await _wait_until_saved(corpus, reads)
    return corpus


async def _wait_until_saved(corpus: Corpus, reads: Sequence[RowResult]) -> None:
    """Releases the corpus where a state could not be saved, or this is cancelled."""
    try:
        await asyncio.gather(*(asyncio.wrap_future(result.saved) for result in reads if result.saved is not None))
    except BaseException:
        await corpus.release()
        raise


def _check_pool(worker: LoadedModel, instruction_tokens: int, texts: Sequence[Sequence[int]]) -> None:
    """Refuses a document whose longest shard cannot be asked by itself, before any of it is read. That not all shards
    fit at once is no hindrance: a round then goes in waves."""
    longest = max(map(len, texts), default=0)
    # The instructions, a shard behind them with a row over it, and as much again to move in.
    needed = num_pages_for(instruction_tokens) + num_pages_for(instruction_tokens + longest + _ROW_TOKENS) + 2
    if needed > worker.pool_pages:
        page_bytes = worker.pool_bytes / worker.pool_pages
        raise CapacityError(
            f"memory: a shard of {longest:,} tokens and a row over it need {needed * page_bytes / 2**30:.2f} GiB of "
            f"the worker's KV pool, which has {worker.pool_bytes / 2**30:.2f} GiB. Raise --memory, or lower "
            f"--shard-tokens."
        )
