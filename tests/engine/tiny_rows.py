"""Rows for tiny engines: made, run, and their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny_models as tiny
import torch
from tiny_models import TinyEngine
from transformers import PreTrainedModel

from antiphon.engine.batch import Batch, Phase
from antiphon.engine.prefix_store import Keep, Prefix
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.row import Row, RowKind

GREEDY = SamplingParams(max_new_tokens=6)


def suffix_row(ids: list[int], prefix: Prefix | None = None, params: SamplingParams = GREEDY, **parts: Any) -> Row:
    before = [] if prefix is None else list(prefix.token_ids)
    return Row(RowKind.SUFFIX, [*before, *ids], params, prefix=prefix, **parts)


def read_row(ids: list[int], *, keep: Keep = Keep.PINNED) -> Row:
    return Row(RowKind.READ, list(ids), SamplingParams(max_new_tokens=0), keep=keep)


def read(engine: TinyEngine, *token_lists: list[int], keep: Keep = Keep.PINNED) -> list[Prefix]:
    rows = [read_row(ids, keep=keep) for ids in token_lists]
    engine.run(rows)
    prefixes = [row.future.result().prefix for row in rows]
    assert all(prefix is not None for prefix in prefixes)
    return [prefix for prefix in prefixes if prefix is not None]


def new_tokens(engine: TinyEngine, rows: list[Row]) -> list[tuple[int, ...]]:
    engine.run(rows)
    return [row.future.result().new_token_ids for row in rows]


def alone(model: PreTrainedModel, ids: list[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return new_tokens(tiny.tiny_engine(model), [suffix_row(ids, params=params)])[0]


def last_logits(engine: TinyEngine, token_ids: list[int], first_position: int = 0) -> torch.Tensor:
    """Logits after these tokens, from an empty cache."""
    count = len(token_ids)
    pages = engine.lane.store.allocate(4)
    batch = Batch(
        phase=Phase.EXTEND,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        positions=np.arange(first_position, first_position + count, dtype=np.int64),
        row_starts=np.asarray([0, count], dtype=np.int64),
        context_tokens=np.zeros(1, dtype=np.int64),
        block_tables=np.asarray([pages], dtype=np.int32),
        logit_tokens=np.asarray([count - 1], dtype=np.int64),
        score_tokens=np.zeros(0, dtype=np.int64),
        score_targets=np.zeros(0, dtype=np.int64),
    )
    logits: torch.Tensor = engine.lane._runner.launch(batch).result().logits[0]
    return logits
