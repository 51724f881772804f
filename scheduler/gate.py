"""`Gate`: which rows of one query go on after their suffix, decided from first tokens and likelihoods.

`first-token`: a row whose first token leads to an abstention ends there; exact, since the rest is forced.
`likelihood`: the rows whose shard makes the query likeliest go on; approximate. `both`: likeliest of those that do not
abstain. `none`: every row goes on. With `num_readers`, at most that many go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from antiphon.engine.errors import InputError
from antiphon.scheduler.lane import Lane
from antiphon.scheduler.row import Row

GateKind = Literal["none", "first-token", "likelihood", "both"]
GATE_KINDS: tuple[GateKind, ...] = ("none", "first-token", "likelihood", "both")


@dataclass(frozen=True)
class GateOptions:
    """`readers_decode` False ends also the chosen rows: they are only to be named (a second reader decodes)."""

    kind: GateKind = "first-token"
    num_readers: int | None = None
    readers_decode: bool = True

    def __post_init__(self) -> None:
        if self.kind not in GATE_KINDS:
            raise InputError(f"gate: {self.kind!r} is unknown, known are {', '.join(GATE_KINDS)}")
        if self.num_readers is not None and self.num_readers < 1:
            raise InputError(f"gate: readers must be at least 1, got {self.num_readers}")
        if self.kind == "likelihood" and self.num_readers is None:
            raise InputError("gate: the likelihood gate needs a number of readers (--readers)")

    @property
    def scores_query(self) -> bool:
        """Whether rows must score the query's tokens."""
        return self.kind in ("likelihood", "both")


@dataclass(eq=False)
class Gate:
    """One query's gate over its rows. Rows that cannot go on any more are ended at once, and with no limit those that
    can go on at once; with `num_readers` the likeliest so far are held until every row was offered."""

    options: GateOptions
    lane: Lane
    abstain_ids: Sequence[int]
    num_rows: int
    abstained: set[Row] = field(default_factory=set)
    chosen: list[Row] = field(default_factory=list)
    _candidates: list[tuple[float, int, Row]] = field(default_factory=list)
    _num_seen: int = 0

    def watch(self, row: Row) -> None:
        """Makes this the row's gate; a row that fails before it is offered counts as seen."""
        row.gate = self.offer

        def ended(_: object) -> None:
            if row.gate is not None:
                row.gate = None
                self._seen()

        row.future.add_done_callback(ended)

    def offer(self, row: Row, logits: torch.Tensor) -> None:
        """Called by the lane with a held row and its first logits `[vocab]`."""
        row.gate = None
        if self.options.kind in ("first-token", "both") and row.first_token_id in self.abstain_ids:
            self.abstained.add(row)
            self.lane.retire(row)
        else:
            self._compete(row, logits)
        self._seen()

    def _compete(self, row: Row, logits: torch.Tensor) -> None:
        limit = self.options.num_readers
        if limit is None:
            self._choose(row)
            return
        self._candidates.append((self._rank(row, logits), -self._num_seen, row))
        if len(self._candidates) > limit:
            lowest = min(self._candidates, key=lambda candidate: candidate[:2])
            self._candidates.remove(lowest)
            self.lane.retire(lowest[2])

    def _rank(self, row: Row, logits: torch.Tensor) -> float:
        """The query's mean log-probability given the shard; without scores, by how much finding beats abstaining."""
        if self.options.scores_query and row.scores:
            return sum(row.scores) / len(row.scores)
        abstain = logits[list(self.abstain_ids)].max() if self.abstain_ids else torch.tensor(0.0)
        return float(logits[row.first_token_id] - abstain)

    def _seen(self) -> None:
        self._num_seen += 1
        if self._num_seen < self.num_rows:
            return
        for _, _, row in sorted(self._candidates, key=lambda candidate: candidate[:2], reverse=True):
            if not row.future.done():
                self._choose(row)
        self._candidates = []

    def _choose(self, row: Row) -> None:
        self.chosen.append(row)
        if self.options.readers_decode:
            self.lane.resume(row)
        else:
            self.lane.retire(row)
