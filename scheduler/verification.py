"""`Verification`: a row whose step was computed, on its way through the step's logits, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.engine.grammar import GrammarState
from antiphon.engine.sampler import Sampled, SampleRow, sample
from antiphon.kernels.ops import FindPeak
from antiphon.scheduler.plan import Piece
from antiphon.scheduler.row import Row


@dataclass
class Verification:
    """`logit` is the index of the logits that the row's next token is sampled from. Before each token the row is as it
    would be without drafts: all its tokens are computed."""

    piece: Piece
    logit: int
    num_right: int = 0

    @property
    def row(self) -> Row:
        """The piece's row."""
        return self.piece.row

    def advance(self) -> bool:
        """After a token was taken, with what the grammar forced: counts the drafted tokens that they confirm as
        computed. Whether the row can take its next token from this step, too."""
        row = self.row
        if row.future.done():
            return False
        pending = row.token_ids[row.context_tokens :]
        num_right = _num_equal(pending, self.piece.draft[self.num_right :])
        self.num_right += num_right
        self.logit += num_right
        row.context_tokens += num_right
        return bool(pending) and num_right == len(pending)  # a row that a gate holds has none


def sample_verified(logits: Tensor, checks: Sequence[Verification], find_peak: FindPeak) -> list[Sampled]:
    """The next token of each row, from its own logits of `logits [logits, vocab]`."""
    masks: dict[object, NDArray[np.bool_]] = {}
    requests = [
        SampleRow(
            row.params,
            row.token_ids,
            row.new_token_ids,
            row.identity,
            len(row.token_ids),
            None if row.grammar is None else _shared_mask(masks, row.grammar),
        )
        for row in (check.row for check in checks)
    ]
    return sample([logits[check.logit] for check in checks], requests, find_peak)


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


def _shared_mask(masks: dict[object, NDArray[np.bool_]], grammar: GrammarState) -> NDArray[np.bool_]:
    """One mask per distinct grammar state and step."""
    key = grammar.key
    if key not in masks:
        masks[key] = grammar.allowed()
    return masks[key]
