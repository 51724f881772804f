"""Attention plans and caches for kernel tests: rows by their page tables; what nobody wrote is NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from antiphon.kernels.attention_plan import AttentionPlan
from antiphon.kernels.ops import LayerCache

PlanRow = tuple[int, int, Sequence[int]]  # context tokens, new tokens, pages


def attention_plan(rows: Sequence[PlanRow], page_tokens: int = 64) -> AttentionPlan:
    """The plan of a batch that has these rows."""
    width = max(len(pages) for _, _, pages in rows)
    tables = [[*pages, *[-1] * (width - len(pages))] for _, _, pages in rows]
    starts = torch.tensor([0, *(new for _, new, _ in rows)]).cumsum(0)
    contexts = torch.tensor([context for context, _, _ in rows])
    return AttentionPlan(torch.tensor(tables, dtype=torch.int32), starts, contexts, page_tokens)


def poisoned_cache(kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype = torch.float32) -> LayerCache:
    """A layer's cache in which every vector is NaN."""
    shape = (kv_heads, num_slots, head_dim)
    if dtype != torch.int8:
        return LayerCache(torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype))
    k, v = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
    return LayerCache(k, v, torch.full(shape[:2], math.nan), torch.full(shape[:2], math.nan))
