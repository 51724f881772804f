"""A scripted driver, engine and corpus: what ParSer does with them is seen without any model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.corpus import Round, WorkerReply
from antiphon.document import Document, Source
from antiphon.engine.sampling_params import SamplingParams
from antiphon.events import Event
from antiphon.methods import ParSer, ParSerOptions, ParSerPrompts
from antiphon.methods.backend import ScatterOptions
from antiphon.results import Answer
from antiphon.scheduler.session import Generation
from antiphon.scheduler.trace import Trace
from antiphon.sharding import Shard

LINES = ("Ana Reyes directed Blue Sand.", "Ana Reyes was born in Chile.", "Ships are large.")
FACTS = {"Who directed Blue Sand?": (0, "Ana Reyes"), "Where was Ana Reyes born?": (1, "Chile")}
PROMPTS = ParSerPrompts(driver_system="S", tool_description="t", query_description="q", last_turn="LAST")


def call(*queries: str) -> str:
    body = '<tool_call>\n{{"name": "query_agents", "arguments": {{"query": "{}"}}}}\n</tool_call>'
    return "\n".join(body.format(query) for query in queries)


class Characters:
    """A tokenizer with one token a character, and no control tokens but `<tool_call>`."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_id(self, text: str) -> int | None:
        return 1 if text == "<tool_call>" else None


class Chat:
    """A template in the shape of Qwen's."""

    def __init__(self, opening: str = "") -> None:
        self.opening = opening
        self.flags: list[Mapping[str, Any]] = []

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **flags: Any
    ) -> list[int]:
        self.flags.append(flags)
        assert tools and tools[0]["function"]["name"] == "query_agents"
        return Characters().encode(
            "".join(f"[{m['role']}]{m['content']}" for m in messages) + f"[driver]{self.opening}"
        )

    def continuation(self, tool_results: Sequence[str], **flags: Any) -> list[int]:
        self.flags.append(flags)
        return Characters().encode("".join(f"[tool]{result}" for result in tool_results) + f"[driver]{self.opening}")


@dataclass
class Script:
    """A driver that says given turns, and an engine of it; records what the driver was given and (`log`) what happened
    in which order. With `streams` a turn is told character by character, the event loop running between any two;
    `said` is then what is told where that is not the turn, and after `fails_after` characters the turn fails."""

    turns: list[str]
    context_tokens: int = 100_000
    finish_reason: str = "stop"
    opening: str = ""
    last: str = ""
    streams: bool = False
    said: str = ""
    fails_after: int | None = None
    book: Book | None = None
    trace: Trace | None = None
    log: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    grammars: list[str | None] = field(default_factory=list)
    max_new_tokens: list[int] = field(default_factory=list)
    context: str = ""
    num_open: int = 0
    released: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = Characters()
        self.chat = Chat(self.opening)

    @property
    def driver(self) -> Script:
        return self

    def session(self, role: str = "driver") -> Script:
        assert role == "driver"
        self.num_open += 1
        return self

    @property
    def free_tokens(self) -> int:
        return self.context_tokens - len(self.context)

    def append(self, token_ids: Sequence[int]) -> None:
        self.reads.append(self.tokenizer.decode(token_ids))
        self.context += self.reads[-1]

    async def generate(
        self, sampling: SamplingParams, grammar: str | None = None, on_text: Callable[[str], None] | None = None
    ) -> Generation:
        assert 0 < sampling.max_new_tokens < self.free_tokens
        self.grammars.append(grammar)
        self.max_new_tokens.append(sampling.max_new_tokens)
        must_end = self.last and self.reads[-1].endswith("[tool]LAST[driver]")
        text = (self.last if must_end else self.turns.pop(0))[: sampling.max_new_tokens]
        await self._stream(text, on_text)
        cached = len(self.context) - len(self.reads[-1])
        self.context += text + "\0"
        return Generation(tuple(map(ord, text)), text, self.finish_reason, len(self.reads[-1]), cached, len(text))

    async def _stream(self, text: str, on_text: Callable[[str], None] | None) -> None:
        self.log.append("turn begins")
        try:
            for number, character in enumerate(self.said or text if self.streams else ""):
                if number == self.fails_after:
                    raise RuntimeError("the driver failed")
                if on_text is not None:
                    on_text(character)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.log.append("turn cancelled")
            raise
        self.log.append("turn ends")

    def close(self) -> None:
        self.num_open -= 1

    async def register(self, document: Document, **wanted: Any) -> Book:
        assert wanted["worker_instructions"] == PROMPTS.worker_instructions
        book = self.book or Book()
        await book.read()
        self.released = 1
        book.on_release = lambda: setattr(self, "released", 2)
        return book


@dataclass
class Book:
    """A corpus of one shard a line, whose workers know `FACTS`. It takes `read_steps` turns of the event loop to read,
    then raises `read_error` if there is one; a scatter takes `scatter_steps`. `log` is as a `Script`'s."""

    lines: tuple[str, ...] = LINES
    rounds: list[tuple[str, ...]] = field(default_factory=list)
    options: list[ScatterOptions] = field(default_factory=list)
    document_tokens: int = 42
    prefill_tokens: int = 60
    on_release: Callable[[], None] = lambda: None
    read_steps: int = 0
    read_error: Exception | None = None
    scatter_steps: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def document(self) -> Document:
        return Document((Source("book.txt", "\n".join(self.lines)),))

    @property
    def shards(self) -> tuple[Shard, ...]:
        starts = [sum(len(line) + 1 for line in self.lines[:index]) for index in range(len(self.lines))]
        spans = zip(starts, self.lines, strict=True)
        return tuple(Shard(index, 0, at, at + len(line), line) for index, (at, line) in enumerate(spans))

    async def scatter(
        self, queries: Sequence[str], options: ScatterOptions, on_row: Callable[[Any], None], *, joins: bool = False
    ) -> Round:
        self.rounds.append(tuple(queries))
        self.options.append(options)
        await self._take("joins: " * joins + "; ".join(queries), self.scatter_steps)
        replies = []
        for number, query in enumerate(queries):
            knower, answer = FACTS.get(query, (-1, ""))
            for shard, line in enumerate(self.lines):
                text = f'{{"evidence":"{line}","answer":"{answer}"}}' if shard == knower else "Unknown"
                replies.append(WorkerReply(shard, number, text, "stop", shard != knower, None))
                on_row(replies[-1])
        count = len(queries)
        return Round(tuple(replies), 0.5, prefill_tokens=30 * count, cached_tokens=90 * count, decode_tokens=7 * count)

    async def read(self) -> None:
        await self._take("reading", self.read_steps)
        if self.read_error is not None:
            raise self.read_error

    async def release(self) -> None:
        self.on_release()

    async def _take(self, name: str, num_steps: int) -> None:
        self.log.append(f"{name} begins")
        try:
            for _ in range(num_steps):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.log.append(f"{name} cancelled")
            raise
        self.log.append(f"{name} ends")


def ask(script: Script, book: Book | None = None, events: list[Event] | None = None, **options: Any) -> Answer:
    sink = events.append if events is not None else lambda event: None
    parser = ParSer(script, ParSerOptions(**options), prompts=PROMPTS)
    answer = asyncio.run(parser.ask(book or Book(), "Where was the director born?", sink))
    assert script.num_open == 0
    return answer


TWO_HOPS = [call("Who directed Blue Sand?"), call("Where was Ana Reyes born?"), "<answer>Chile</answer>"]
