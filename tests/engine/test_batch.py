"""A batch is plain arrays: where each new token goes, and which runs of slots each row sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from antiphon.engine.batch import Batch, Phase
from antiphon.kernels.attention_plan import AttentionRow, Run


def batch(rows: list[tuple[int, int, list[int]]]) -> Batch:
    """Rows of (context tokens, new tokens, pages)."""
    width = max(len(pages) for _, _, pages in rows)
    tables = np.full((len(rows), width), -1, dtype=np.int32)
    for index, (_, _, pages) in enumerate(rows):
        tables[index, : len(pages)] = pages
    positions = np.concatenate([np.arange(context, context + new) for context, new, _ in rows])
    none = np.zeros(0, dtype=np.int64)
    return Batch(
        phase=Phase.EXTEND,
        token_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        row_starts=np.cumsum([0, *(new for _, new, _ in rows)]),
        context_tokens=np.asarray([context for context, _, _ in rows]),
        block_tables=tables,
        logit_tokens=none,
        score_tokens=none,
        score_targets=none,
    )


def plan(context: int, new: int, pages: list[int]) -> AttentionRow:
    return batch([(context, new, pages)]).attention_plan().rows[0]


def test_slots_follow_the_block_table_and_are_64_bits_wide() -> None:
    huge = 2**27
    rows = batch([(62, 4, [5, 2]), (0, 1, [7]), (64, 2, [1, huge])])
    assert rows.slots().dtype == np.int64
    assert rows.slots().tolist() == [5 * 64 + 62, 5 * 64 + 63, 128, 129, 7 * 64, huge * 64, huge * 64 + 1]
    assert rows.num_rows == 3


def test_the_attention_plan_is_the_batch_s_own_arrays() -> None:
    rows = batch([(62, 4, [5, 2]), (0, 1, [7])])
    found = rows.attention_plan()
    assert found.page_tokens == 64
    for array, tensor in (
        (rows.block_tables, found.block_tables),
        (rows.row_starts, found.row_starts),
        (rows.context_tokens, found.context_tokens),
    ):
        assert tensor.is_contiguous() and tensor.data_ptr() == array.ctypes.data
        assert tensor.numpy().dtype == array.dtype
    assert (found.block_tables.dtype, found.row_starts.dtype) == (torch.int32, torch.int64)
    assert found.rows is found.rows, "runs are built once for all layers"


def test_pages_that_follow_each_other_are_one_run() -> None:
    assert plan(128, 64, [3, 4, 5]) == AttentionRow(0, 64, (Run(192, 128),), (Run(320, 64),))
    assert plan(192, 2, [3, 4, 9, 10]).context == (Run(192, 128), Run(576, 64))
    assert plan(128, 2, [4, 3, 2]).context == (Run(256, 64), Run(192, 64))


@pytest.mark.parametrize(
    ("context", "new", "expected"),
    [
        (0, 2, AttentionRow(0, 2, (), (Run(512, 2),))),
        (1, 2, AttentionRow(0, 2, (Run(512, 1),), (Run(513, 2),))),
        (63, 2, AttentionRow(0, 2, (Run(512, 63),), (Run(575, 1), Run(64, 1)))),
        (64, 2, AttentionRow(0, 2, (Run(512, 64),), (Run(64, 2),))),
        (65, 2, AttentionRow(0, 2, (Run(512, 64), Run(64, 1)), (Run(65, 2),))),
        (0, 130, AttentionRow(0, 130, (), (Run(512, 64), Run(64, 66)))),
    ],
)
def test_context_and_own_tokens_are_cut_where_the_new_ones_start(
    context: int, new: int, expected: AttentionRow
) -> None:
    assert plan(context, new, [8, 1, 2]) == expected


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (0, AttentionRow(0, 1, (), (Run(512, 1),))),
        (63, AttentionRow(0, 1, (), (Run(512, 64),))),
        (64, AttentionRow(0, 1, (Run(512, 64),), (Run(64, 1),))),
        (128, AttentionRow(0, 1, (Run(512, 64),), (Run(64, 65),))),
    ],
)
def test_a_lone_token_s_own_run_reaches_back_as_far_as_pages_are_consecutive(
    context: int, expected: AttentionRow
) -> None:
    assert plan(context, 1, [8, 1, 2]) == expected


def test_rows_of_one_batch_have_their_own_tokens_and_tables() -> None:
    rows = batch([(64, 1, [6, 4]), (0, 3, [2])]).attention_plan().rows
    assert rows[0] == AttentionRow(0, 1, (Run(384, 64),), (Run(256, 1),))
    assert rows[1] == AttentionRow(1, 4, (), (Run(128, 3),))
