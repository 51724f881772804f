"""How the memory budget is divided: weights, workspaces, the driver's pages, and the rest for shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import CapacityError
from antiphon.engine.ledger import GIB, Ledger
from antiphon.engine.memory_limit import available_bytes
from antiphon.engine.models.decoder import weight_bytes
from antiphon.engine.pages import PAGE_TOKENS, KVCache
from antiphon.precision import Precision

# Left to the rest of the machine when the budget is not given.
_RESERVE_BYTES = GIB
# A driver holds a conversation or two, and the shards that it reads as second reader.
_DRIVER_POOL_TOKENS = 32_768
_MAX_POOL_TOKENS = 4_194_304
_MIN_POOL_TOKENS = 1_024


@dataclass(frozen=True)
class MemoryPlan:
    """Pages of each pool. The ledger has every byte of it."""

    worker_pages: int
    driver_pages: int


def new_ledger(memory_bytes: int | None) -> Ledger:
    """A ledger over `memory_bytes`, or over what is free less a reserve."""
    return Ledger(memory_bytes if memory_bytes is not None else max(0, available_bytes() - _RESERVE_BYTES))


def plan_memory(
    ledger: Ledger,
    worker: ModelConfig,
    driver: ModelConfig | None,
    precision: Precision,
    step_tokens: int,
    host_bytes: int = 0,
) -> MemoryPlan:
    """Books everything before anything is allocated; raises `CapacityError` where it cannot fit. `driver` None means
    that one model plays both roles."""
    for role, config in (("worker", worker), ("driver", driver)):
        if config is not None:
            ledger.reserve(f"{role} weights", weight_bytes(config, precision.weights))
            ledger.reserve("workspaces", workspace_bytes(config, step_tokens, precision.activations))
    if host_bytes:
        ledger.reserve("host tier", host_bytes)
    driver_pages = 0
    if driver is not None:
        page_bytes = KVCache.page_bytes(driver, precision.kv)
        wanted = _DRIVER_POOL_TOKENS // PAGE_TOKENS
        driver_pages = min(wanted, ledger.free_bytes // 2 // page_bytes)
        _reserve_pages(ledger, "driver KV pool", driver_pages, page_bytes)
    page_bytes = KVCache.page_bytes(worker, precision.kv)
    worker_pages = min(_MAX_POOL_TOKENS // PAGE_TOKENS, ledger.free_bytes // page_bytes)
    _reserve_pages(ledger, "worker KV pool", worker_pages, page_bytes)
    return MemoryPlan(worker_pages, driver_pages or worker_pages)


def workspace_bytes(config: ModelConfig, step_tokens: int, dtype: torch.dtype) -> int:
    """An upper estimate of what one step needs beside weights and pages: activations of `step_tokens` tokens, and
    64 rows of fp32 logits with their softmax."""
    activations = step_tokens * (4 * config.hidden_size + 3 * config.intermediate_size) * dtype.itemsize
    heads = step_tokens * config.num_heads * config.head_dim * 4 * 6
    return activations + heads + 3 * 64 * config.vocab_size * 4


def _reserve_pages(ledger: Ledger, holder: str, num_pages: int, page_bytes: int) -> None:
    minimum = _MIN_POOL_TOKENS // PAGE_TOKENS
    if num_pages < minimum:
        raise CapacityError(
            f"memory: the {holder} needs at least {minimum * page_bytes / GIB:.2f} GiB ({_MIN_POOL_TOKENS} tokens), "
            f"{ledger.free_bytes / GIB:.2f} GiB of a budget of {ledger.budget_bytes / GIB:.2f} GiB is left beside "
            f"{', '.join(ledger.entries)}. Raise --memory or choose a smaller model."
        )
    ledger.reserve(holder, num_pages * page_bytes)
