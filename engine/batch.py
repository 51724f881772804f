"""What the model is given (step 7 of the reading path): a `Batch` of plain arrays.

Which component fills which field: the scheduler's `plan_batch` fills all of them from rows; the runner reads them and
writes nothing back. Being plain arrays, a batch could be sent to other processes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.engine.pages import PAGE_TOKENS
from antiphon.kernels.attention_plan import AttentionPlan

IntArray = NDArray[np.int64]


class Phase(Enum):
    """What the rows of a batch are doing. Explicit, never inferred from a shape."""

    READ = "read"
    EXTEND = "extend"
    DECODE = "decode"


@dataclass(frozen=True)
class Batch:
    """New tokens of some rows, and where their keys and values lie.

    | field          | shape           | meaning                                                          |
    |----------------|-----------------|------------------------------------------------------------------|
    | token_ids      | [tokens]        | new tokens of all rows, row after row                            |
    | positions      | [tokens]        | their positions, from 0 at the start of the prefix               |
    | row_starts     | [rows + 1]      | where each row's new tokens start                                |
    | context_tokens | [rows]          | tokens that were computed before these                           |
    | block_tables   | [rows, pages]   | int32 page of each 64 tokens, -1 past the end                    |
    | logit_tokens   | [logits]        | indices (into tokens) whose logits are wanted                    |
    | score_tokens   | [scores]        | indices whose next token's log-probability is wanted             |
    | score_targets  | [scores]        | those next tokens                                                |
    """

    phase: Phase
    token_ids: IntArray
    positions: IntArray
    row_starts: IntArray
    context_tokens: IntArray
    block_tables: NDArray[np.int32]
    logit_tokens: IntArray
    score_tokens: IntArray
    score_targets: IntArray

    @property
    def num_rows(self) -> int:
        """Rows in this batch."""
        return len(self.context_tokens)

    def slots(self) -> IntArray:
        """The slot (place in the pool, in tokens) of every new token, `[tokens]` int64."""
        row_of_token = np.repeat(np.arange(self.num_rows), np.diff(self.row_starts))
        pages = self.block_tables[row_of_token, self.positions // PAGE_TOKENS].astype(np.int64)
        return pages * PAGE_TOKENS + self.positions % PAGE_TOKENS

    def attention_plan(self) -> AttentionPlan:
        """Where the keys of every row lie, for the attention kernels; shares this batch's arrays."""
        return AttentionPlan(
            torch.from_numpy(self.block_tables),
            torch.from_numpy(self.row_starts),
            torch.from_numpy(self.context_tokens),
            PAGE_TOKENS,
        )
