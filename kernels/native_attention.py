"""Paged attention in C++ (csrc/cpu/attention.h): one kernel for read, extend and decode.

A query's result has the same bits whatever else is in the batch, however its row was cut into steps, and on any number
of threads: pages are summed one by one in ascending order, each in a fixed order inside. Rows that read the same pages
(several queries over one shard) share the reading. How the work is cut is planned once for all layers of a batch.

With AMX or AVX-512 BF16 and bfloat16 or int8 storage another form serves (csrc/cpu/attention_bf16.h): it multiplies
bfloat16, so queries and softmax weights are rounded to it. A query that sees a stored bfloat16 value that is not finite
is NaN throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from antiphon.kernels import native
from antiphon.kernels.native_cache import PAGE_TOKENS, STORAGES, addresses, check_cache, check_float32
from antiphon.kernels.ops import AttentionPlan, LayerCache

if TYPE_CHECKING:
    from antiphon.kernels._native import PlannedAttention


def paged_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor:
    """See `ops.PagedAttention`. `q [tokens, heads, head_dim]` is float32, contiguous, on the CPU; so is the result.

    TypeError or ValueError, before any work, for another dtype, shape or layout, for a plan that does not cover q's
    tokens, and for one whose pages are not in the cache. Runs without the interpreter's lock, on the pool's threads.
    """
    check_cache(cache)
    check_float32("q", q)
    kv_heads, _, head_dim = cache.k.shape
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] == 0 or q.shape[1] % kv_heads or not q.is_contiguous():
        raise ValueError(
            f"q is {tuple(q.shape)} with strides {q.stride()}; need contiguous [tokens, {kv_heads} * n, {head_dim}]"
        )
    planned = _planned(plan, cache, q.shape[1])
    if planned.num_tokens != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} tokens, the plan's rows have {planned.num_tokens}")
    out = torch.empty(q.shape[0], q.shape[1] * head_dim)
    planned.run(q.data_ptr(), *addresses(cache), out.data_ptr())
    return out


def _planned(plan: AttentionPlan, cache: LayerCache, num_heads: int) -> PlannedAttention:
    """The plan under caches of this shape, made at the first call."""
    key = ("native", num_heads, cache.k.shape, cache.k.dtype)
    if key not in plan.derived:
        plan.derived[key] = _make_planned(plan, cache, num_heads)
    return cast("PlannedAttention", plan.derived[key])


def _make_planned(plan: AttentionPlan, cache: LayerCache, num_heads: int) -> PlannedAttention:
    tables, starts, context = plan.block_tables, plan.row_starts, plan.context_tokens
    for name, array, dtype in (
        ("block_tables", tables, torch.int32),
        ("row_starts", starts, torch.int64),
        ("context_tokens", context, torch.int64),
    ):
        if array.dtype != dtype or array.device.type != "cpu":
            raise TypeError(f"{name} is {array.dtype} on {array.device}; need {dtype} on the CPU")
        if not array.is_contiguous():
            raise ValueError(f"{name} has strides {array.stride()}; it must be contiguous")
    num_rows = context.numel()
    if plan.page_tokens != PAGE_TOKENS:
        raise ValueError(f"pages are of {plan.page_tokens} tokens; this kernel reads pages of {PAGE_TOKENS}")
    if tables.dim() != 2 or tables.shape[0] != num_rows or starts.shape != (num_rows + 1,) or context.dim() != 1:
        raise ValueError(
            f"block_tables {tuple(tables.shape)}, row_starts {tuple(starts.shape)} and context_tokens "
            f"{tuple(context.shape)} are not those of one number of rows"
        )
    module = native.extension()
    kv_heads, num_slots, head_dim = cache.k.shape
    planned: PlannedAttention = module.PlannedAttention(
        tables.data_ptr(),
        tables.shape[1],
        starts.data_ptr(),
        context.data_ptr(),
        num_rows,
        num_heads,
        module.KvShape(STORAGES[cache.k.dtype], kv_heads, num_slots, head_dim),
        native.isa(),
    )
    return planned
