"""Rows to a `Batch`: which of their pending tokens go into this step, and what is wanted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.engine.batch import Batch, Phase
from antiphon.scheduler.row import Row


@dataclass(frozen=True)
class Piece:
    """The next `num_tokens` pending tokens of a row, and the `draft` behind them, which `match_tokens` of the text that
    it quotes led to (`scheduler/speculation.py`)."""

    row: Row
    num_tokens: int
    draft: tuple[int, ...] = ()
    match_tokens: int = 0

    @property
    def num_computed(self) -> int:
        """Tokens that are computed for it."""
        return self.num_tokens + len(self.draft)

    @property
    def completes(self) -> bool:
        """Whether nothing of the row is pending after this piece."""
        return self.num_tokens == self.row.num_pending


def cut_pieces(rows: Sequence[Row], budget_tokens: int) -> list[Piece]:
    """Pieces of the first rows' pending tokens, in order, that fit the budget together; at least one token."""
    pieces = []
    for row in rows:
        num_tokens = min(row.num_pending, budget_tokens)
        if num_tokens <= 0:
            break
        pieces.append(Piece(row, num_tokens))
        budget_tokens -= num_tokens
    return pieces


def plan_batch(phase: Phase, pieces: Sequence[Piece]) -> Batch:
    """Fills every field of a `Batch` from the pieces."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_tokens: list[int] = []
    score_tokens: list[int] = []
    score_targets: list[int] = []
    row_starts = [0]
    for piece in pieces:
        row, first = piece.row, piece.row.context_tokens
        last = first + piece.num_tokens
        offset = len(token_ids) - first
        token_ids += row.token_ids[first:last]
        token_ids += piece.draft
        positions += range(first, last + len(piece.draft))
        if piece.completes and phase is not Phase.READ:
            logit_tokens += range(offset + last - 1, offset + last + len(piece.draft))
        for position in range(max(first, row.score_start - 1), min(last, row.score_stop - 1)):
            score_tokens.append(offset + position)
            score_targets.append(row.token_ids[position + 1])
        row_starts.append(len(token_ids))
    width = max(len(piece.row.pages) for piece in pieces)
    tables = np.full((len(pieces), width), -1, dtype=np.int32)
    for index, piece in enumerate(pieces):
        tables[index, : len(piece.row.pages)] = piece.row.pages
    return Batch(
        phase=phase,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        positions=np.asarray(positions, dtype=np.int64),
        row_starts=np.asarray(row_starts, dtype=np.int64),
        context_tokens=np.asarray([piece.row.context_tokens for piece in pieces], dtype=np.int64),
        block_tables=tables,
        logit_tokens=np.asarray(logit_tokens, dtype=np.int64),
        score_tokens=np.asarray(score_tokens, dtype=np.int64),
        score_targets=np.asarray(score_targets, dtype=np.int64),
    )


def num_scores(piece: Piece) -> int:
    """How many scores `plan_batch` asks for in this piece."""
    row, first = piece.row, piece.row.context_tokens
    return max(0, min(first + piece.num_tokens, row.score_stop - 1) - max(first, row.score_start - 1))
