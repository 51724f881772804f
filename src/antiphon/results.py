"""What an answer is made of: the nouns of `antiphon ask --json`. Fields are only ever added."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """One finding. `start`/`end` are character offsets in `source`'s extracted text; -1 if unverified."""

    source: str
    start: int
    end: int
    line: int | None
    page: int | None
    quote: str
    answer: str
    verified: bool
    relevance: float | None
    shard: int
    query: str
    round: int


@dataclass(frozen=True)
class RoundRecord:
    """One scatter of queries and its gathering. `relevance[query][shard]` is the likelihood gate's value, None where
    it did not run."""

    queries: tuple[str, ...]
    findings: int
    abstentions: int
    seconds: float
    relevance: tuple[tuple[float | None, ...], ...] = ()


@dataclass
class Usage:
    """Tokens spent, by who spent them and how."""

    document_tokens: int = 0
    shards: int = 0
    worker_prefill_tokens: int = 0
    worker_cached_tokens: int = 0
    worker_decode_tokens: int = 0
    driver_prefill_tokens: int = 0
    driver_cached_tokens: int = 0
    driver_decode_tokens: int = 0


@dataclass
class Seconds:
    """Wall-clock seconds of each phase: `read` until all shards were read, `rounds` and `driver` the sums over rounds
    (each from its first scatter to its last reply) and over the driver's turns, `total` all of it. With overlap phases
    run beside each other and slow each other down, so that their sum can be more than `total`."""

    load: float = 0.0
    read: float = 0.0
    rounds: float = 0.0
    driver: float = 0.0
    total: float = 0.0


@dataclass
class Answer:
    """The outcome of one question. `stopped` says why the method ended: answered, rounds, no-document…; `counters` are
    the engine's, by role, where the engine was made for this question (`Engine.counters`)."""

    answer: str
    method: str
    evidence: list[Evidence] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    seconds: Seconds = field(default_factory=Seconds)
    stopped: str = "answered"
    notes: list[str] = field(default_factory=list)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dumps`."""
        return asdict(self)
