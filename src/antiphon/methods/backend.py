"""What a method needs of the engine, as protocols: the engine fits them, and so does a scripted one in a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.document import Document
from antiphon.engine.sampling_params import SamplingParams
from antiphon.events import EventSink
from antiphon.methods.options import Gate, ReplyGrammar
from antiphon.methods.worker_reply import reply_grammar
from antiphon.scheduler.trace import Trace
from antiphon.sharding import Shard


@dataclass(frozen=True)
class ScatterOptions:
    """How a round's rows are decoded and which of them go on; see `ParSerOptions` for the fields."""

    sampling: SamplingParams
    grammar: ReplyGrammar = "unknown-or-json"
    gate: Gate = "first-token"
    readers: int | None = None
    second_reader: bool = False

    def reply_lark(self, shard_text: str) -> str | None:
        """The grammar of replies about a shard, as Lark text; None where workers write freely."""
        return None if self.grammar == "none" else reply_grammar(self.grammar, shard_text)


class WorkerReply(Protocol):
    """One row's outcome: `shard` and `query` are indices, `relevance` the likelihood gate's value where it ran."""

    @property
    def shard(self) -> int: ...
    @property
    def query(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def abstained(self) -> bool: ...
    @property
    def relevance(self) -> float | None: ...


class Round(Protocol):
    """All rows of one scatter, and what they cost."""

    @property
    def replies(self) -> Sequence[WorkerReply]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...


class Corpus(Protocol):
    """Registered shards of a document. `document_tokens` is the length of all shards without instructions,
    `prefill_tokens` what reading them cost."""

    @property
    def document(self) -> Document: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def document_tokens(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...

    async def scatter(
        self, queries: Sequence[str], options: ScatterOptions, on_row: Callable[[Any], None], *, joins: bool = False
    ) -> Round:
        """Ask every shard every query; `on_row` is called with each `WorkerReply` when its row ends. With `joins` they
        belong to the round of the scatter before: its rows and theirs are urgent alike."""
        ...

    async def release(self) -> None:
        """Give back all that the shards hold."""
        ...


class Generation(Protocol):
    """One turn that a session wrote; `text` keeps special tokens as their strings."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...


class Session(Protocol):
    """A conversation in tokens that keeps its KV between turns. A turn always ends with its end token, added if cut."""

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit the context."""
        ...

    def append(self, token_ids: Sequence[int]) -> None: ...
    async def generate(
        self, sampling: SamplingParams, grammar: str | None = None, on_text: Callable[[str], None] | None = None
    ) -> Generation:
        """Write a turn; `on_text` is called with its text as it comes."""
        ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """The part of a tokenizer that a method uses."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def token_id(self, text: str) -> int | None: ...


class ChatFormat(Protocol):
    """A model's chat template as tokens; contents are plain text, whatever they hold."""

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **flags: Any
    ) -> list[int]: ...
    def continuation(self, tool_results: Sequence[str], **flags: Any) -> list[int]: ...


class LoadedModel(Protocol):
    """A model in a role."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat(self) -> ChatFormat: ...


class Engine(Protocol):
    """Where sessions and corpora come from."""

    @property
    def driver(self) -> LoadedModel: ...
    @property
    def trace(self) -> Trace | None: ...
    def session(self, role: str = "driver") -> Session: ...

    async def register(
        self,
        document: Document,
        *,
        shard_tokens: int,
        shard_overlap: int = 0,
        worker_instructions: str,
        on_event: EventSink,
    ) -> Corpus:
        """Cut a document into shards and have a worker read each, behind the instructions."""
        ...
