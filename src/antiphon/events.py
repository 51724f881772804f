"""What happens while a question is answered, as values: the live view, the server and notebooks read these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.results import Answer, Evidence


@dataclass(frozen=True)
class ModelLoaded:
    """A model is ready. `role` is worker or driver."""

    role: str
    name: str
    seconds: float


@dataclass(frozen=True)
class ReadProgress:
    """Shards read so far of a corpus, and document tokens read of all there are."""

    shards_done: int
    shards_total: int
    tokens_done: int
    tokens_total: int


@dataclass(frozen=True)
class DriverTurn:
    """The driver finished a turn; `text` is all it wrote."""

    turn: int
    text: str
    seconds: float


@dataclass(frozen=True)
class RoundStarted:
    """Queries were scattered over all shards."""

    round: int
    queries: tuple[str, ...]
    shards: int


@dataclass(frozen=True)
class RowFinished:
    """One shard answered one query (`query` is an index into the round's queries)."""

    round: int
    query: int
    shard: int
    abstained: bool


@dataclass(frozen=True)
class FindingFound:
    """A finding was parsed and its quote looked up in the shard."""

    evidence: Evidence


@dataclass(frozen=True)
class RoundFinished:
    """All rows of a round ended."""

    round: int
    findings: int
    abstentions: int
    seconds: float


@dataclass(frozen=True)
class Answered:
    """The method ended."""

    answer: Answer


Event = ModelLoaded | ReadProgress | DriverTurn | RoundStarted | RowFinished | FindingFound | RoundFinished | Answered
EventSink = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """The sink for callers that only want the answer."""
