"""What the live view knows: a fold over `antiphon.events`, without a terminal and without a clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from antiphon.events import (
    Answered,
    DriverTurn,
    Event,
    FindingFound,
    ModelLoaded,
    ReadProgress,
    RoundFinished,
    RoundStarted,
    RowFinished,
)
from antiphon.results import Answer, Evidence


class ShardState(Enum):
    """Where a shard stands. The order is precedence: of several shards in one cell, the last in this order shows."""

    ABSTAINED = "abstained"
    ASKED = "asked"
    READ = "read"
    WAITING = "waiting"
    FOUND = "found"


@dataclass
class RoundState:
    """One round so far. `rows` maps shard, then query, to whether that row abstained."""

    number: int
    queries: tuple[str, ...]
    shards: int
    rows: dict[int, dict[int, bool]] = field(default_factory=dict)
    seconds: float | None = None
    findings: int = 0
    abstentions: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the whole round."""
        return self.shards * len(self.queries)

    @property
    def num_rows_done(self) -> int:
        """Rows that ended."""
        return self.num_rows if self.seconds is not None else sum(map(len, self.rows.values()))

    def shard_state(self, shard: int) -> ShardState:
        """Found if any row found; abstained once every query's row has; asked until then."""
        rows = self.rows.get(shard, {})
        if not all(rows.values()):
            return ShardState.FOUND
        return ShardState.ABSTAINED if len(rows) >= len(self.queries) else ShardState.ASKED


@dataclass
class LiveState:
    """All that was reported so far. `clock` gives seconds; it is read once per event, never while drawing."""

    clock: Callable[[], float] = time.monotonic
    models: dict[str, ModelLoaded] = field(default_factory=dict)
    read: ReadProgress | None = None
    rounds: list[RoundState] = field(default_factory=list)
    findings: list[Evidence] = field(default_factory=list)
    turns: list[DriverTurn] = field(default_factory=list)
    answer: Answer | None = None
    started: float = field(init=False)
    _read_first: tuple[float, int] = (0.0, 0)
    _read_last: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.clock()
        self._read_first = (self.started, 0)

    def apply(self, event: Event) -> None:
        """Take one event in; an event of a kind not known here changes nothing."""
        match event:
            case ModelLoaded():
                self.models[event.role] = event
                # Until the first progress is reported, reading counts from here.
                self._read_first = (self.clock(), 0)
            case ReadProgress():
                self._apply_read(event)
            case DriverTurn():
                self.turns.append(event)
            case RoundStarted():
                self.rounds.append(RoundState(event.round, event.queries, event.shards))
            case RowFinished():
                self._apply_row(event)
            case FindingFound():
                self.findings.append(event.evidence)
            case RoundFinished():
                self._apply_round_end(event)
            case Answered():
                self.answer = event.answer

    @property
    def round(self) -> RoundState | None:
        """The newest round."""
        return self.rounds[-1] if self.rounds else None

    @property
    def num_shards(self) -> int:
        """Shards of the corpus, 0 while unknown."""
        return max(self.read.shards_total if self.read else 0, self.round.shards if self.round else 0)

    @property
    def read_done(self) -> bool:
        """Whether every shard has been read."""
        return self.read is not None and self.read.shards_done >= self.read.shards_total

    @property
    def read_tokens_per_second(self) -> float:
        """Document tokens read a second, from the first report to the last; 0 while unknown."""
        seconds = self._read_last - self._read_first[0]
        tokens = (self.read.tokens_done if self.read else 0) - self._read_first[1]
        return tokens / seconds if seconds > 0 and tokens > 0 else 0.0

    @property
    def activity(self) -> str:
        """What is going on, in two or three words."""
        if self.answer is not None:
            return "answered"
        if self.round is not None and self.round.seconds is None:
            return f"asking, round {self.round.number}"
        if self.read is not None and not self.read_done:
            return "reading"
        if self.read is not None or self.turns:
            return "driver is thinking"
        return "loading models" if len(self.models) < 2 else "preparing"

    def shard_state(self, shard: int) -> ShardState:
        """The state of one shard: of the newest round, or of the reading before there is one."""
        if self.round is not None and shard < self.round.shards:
            state = self.round.shard_state(shard)
            if state is not ShardState.ASKED or self._is_read(shard):
                return state
        return ShardState.READ if self._is_read(shard) else ShardState.WAITING

    def _is_read(self, shard: int) -> bool:
        # A corpus that was registered before this view began reports no reading at all.
        return self.read is None or shard < self.read.shards_done

    def _apply_read(self, event: ReadProgress) -> None:
        self._read_last = self.clock()
        if self.read is None and event.shards_done == 0:
            self._read_first = (self._read_last, event.tokens_done)
        self.read = event

    def _apply_row(self, event: RowFinished) -> None:
        for state in self.rounds:
            if state.number == event.round:
                rows = state.rows.setdefault(event.shard, {})
                # A second reader may find what the first one did not: a find stays a find.
                rows[event.query] = rows.get(event.query, True) and event.abstained

    def _apply_round_end(self, event: RoundFinished) -> None:
        for state in self.rounds:
            if state.number == event.round:
                state.seconds = event.seconds
                state.findings, state.abstentions = event.findings, event.abstentions
