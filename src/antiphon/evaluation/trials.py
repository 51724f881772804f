"""One trial: a question asked of a document under one configuration, with all that happened on the way as a log row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from antiphon.engine.errors import AntiphonError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.evaluation.configurations import Configuration
from antiphon.evaluation.qa_data import QaDocument, Question
from antiphon.evaluation.retrieval import most_relevant, recall, shards_of
from antiphon.events import Answered, Event, ReadProgress, RowFinished

if TYPE_CHECKING:
    from antiphon.api import Engine
    from antiphon.methods.backend import Corpus, Round, ScatterOptions, WorkerReply

# What a row's finish reason says where the gate ended it.
_GATED = "gated"
_FULL_CONTEXT_SYSTEM = (
    "You answer questions from the documents you are given. Reply with the answer alone, in a few words."
)
_FULL_CONTEXT_NEW_TOKENS = 64


@dataclass(frozen=True)
class ReadDocument:
    """A question's document, registered once for all configurations. `read_seconds` is what the reading took."""

    document: QaDocument
    corpus: Corpus
    read_seconds: float


class RecordingCorpus:
    """A corpus that keeps what every scatter sent and got, and otherwise is the corpus it wraps."""

    def __init__(self, corpus: Any) -> None:
        self._corpus = corpus
        self.scatters: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corpus, name)

    async def scatter(
        self, queries: Sequence[str], options: ScatterOptions, on_row: Callable[[Any], None], *, joins: bool = False
    ) -> Round:
        """As `Corpus.scatter`; the round's record holds replies that did not abstain, and every row's relevance."""
        round_: Round = await self._corpus.scatter(queries, options, on_row, joins=joins)
        num_shards = len(self._corpus.shards)
        relevance: list[list[float | None]] = [[None] * num_shards for _ in queries]
        ungated: list[list[int]] = [[] for _ in queries]
        for reply in round_.replies:
            relevance[reply.query][reply.shard] = reply.relevance
            if reply.finish_reason != _GATED:
                ungated[reply.query].append(reply.shard)
        self.scatters.append(
            {
                "queries": list(queries),
                "gate": options.gate,
                "readers": options.readers,
                "second_reader": options.second_reader,
                "replies": [_reply(reply) for reply in round_.replies if not reply.abstained],
                "relevance": relevance,
                "ungated": ungated,
                "seconds": round_.seconds,
            }
        )
        return round_


def _reply(reply: WorkerReply) -> dict[str, Any]:
    return {name: getattr(reply, name) for name in ("shard", "query", "text", "finish_reason", "relevance")}


async def run_trial(
    engine: Engine,
    read: ReadDocument | None,
    document: QaDocument,
    question: Question,
    configuration: Configuration,
    num_readers: int = 4,
) -> dict[str, Any]:
    """Ask and return the log row. An error that Antiphon raises on purpose is the trial's outcome, not the run's end.

    `read` may be None for the full context alone. Its `read_seconds` were spent once, yet stand in every row's
    `seconds`, so that each row's total is what the question would take by itself.
    """
    start = time.perf_counter()
    try:
        if configuration.full_context:
            outcome = await _ask_full_context(engine, document, question)
        else:
            if read is None:
                raise ValueError(f"{configuration.name} scatters, so it needs the document read")
            outcome = await _ask_parser(engine, read, question, configuration.parser_options(num_readers))
    except AntiphonError as error:
        outcome = {"prediction": "", "error": f"{type(error).__name__}: {error}", "seconds": {}}
    ask_seconds = time.perf_counter() - start
    read_seconds = 0.0 if configuration.full_context or read is None else read.read_seconds
    phases = {**outcome.pop("seconds"), "read": read_seconds, "total": read_seconds + ask_seconds}
    return {
        "configuration": configuration.name,
        "question_id": question.id,
        "question": question.question,
        "answers": list(question.answers),
        **outcome,
        "seconds": phases,
    }


async def _ask_parser(
    engine: Engine, read: ReadDocument, question: Question, options: dict[str, Any]
) -> dict[str, Any]:
    from antiphon.methods.options import ParSerOptions
    from antiphon.methods.parser import ParSer

    corpus = RecordingCorpus(read.corpus)
    events: list[dict[str, Any]] = []

    def keep(event: Event) -> None:
        if not isinstance(event, RowFinished | ReadProgress | Answered):
            events.append({"event": type(event).__name__, **asdict(event)})

    parser = ParSer(engine, ParSerOptions.from_mapping(options))
    answer = await parser.ask(corpus, question.question, on_event=keep)
    gold = gold_shards(read.document, question, read.corpus)
    return {
        "prediction": answer.answer,
        "stopped": answer.stopped,
        "num_rounds": len(answer.rounds),
        "seconds": {"rounds": answer.seconds.rounds, "driver": answer.seconds.driver},
        "recall_findings": recall(gold, {evidence.shard for evidence in answer.evidence}),
        "recall_readers": recall_readers(gold, corpus.scatters),
        "gold_shards": [sorted(shards) for shards in gold],
        "usage": asdict(answer.usage),
        "trajectory": {"events": events, "scatters": corpus.scatters, "answer": answer.to_json()},
    }


async def _ask_full_context(engine: Engine, document: QaDocument, question: Question) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": _FULL_CONTEXT_SYSTEM},
        {"role": "user", "content": f"{document.text}\n\nQuestion: {question.question}\nReply with the answer alone."},
    ]
    start = time.perf_counter()
    session = engine.session("driver")
    try:
        session.append(engine.driver.chat.prompt(messages))
        generation = await session.generate(SamplingParams(max_new_tokens=_FULL_CONTEXT_NEW_TOKENS))
    finally:
        session.close()
    return {
        "prediction": generation.text.strip(),
        "stopped": generation.finish_reason,
        "num_rounds": 0,
        "seconds": {"rounds": 0.0, "driver": time.perf_counter() - start},
        "usage": {
            "driver_prefill_tokens": generation.prefill_tokens,
            "driver_cached_tokens": generation.cached_tokens,
            "driver_decode_tokens": generation.decode_tokens,
        },
        "trajectory": {"messages": messages, "reply": generation.text},
    }


def gold_shards(document: QaDocument, question: Question, corpus: Corpus) -> list[frozenset[int]]:
    """For each gold paragraph of the question, the shards that hold a part of it."""
    spans = [(shard.start, shard.end) for shard in corpus.shards]
    return [shards_of(document.span(paragraph_id), spans) for paragraph_id in question.gold]


def recall_readers(gold: list[frozenset[int]], scatters: list[dict[str, Any]]) -> float | None:
    """Recall of the shards that went on after the gate, over all rounds; None where there was no round.

    Where likelihoods ranked them these are each query's `readers` most relevant; else the rows that were not gated,
    which with a second reader leaves out those that it read and found nothing in.
    """
    if not scatters:
        return None
    read: set[int] = set()
    for scatter in scatters:
        ranked = scatter["gate"] in ("likelihood", "both") and scatter["readers"]
        for relevances, ungated in zip(scatter["relevance"], scatter["ungated"], strict=True):
            read.update(most_relevant(relevances, scatter["readers"]) if ranked else ungated)
    return recall(gold, read)
