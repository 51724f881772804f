"""From names of models to a running core: resolves, books memory, loads, and wires one lane per model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from antiphon.engine.chat import ChatFormat
from antiphon.engine.errors import InputError
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.ledger import Ledger
from antiphon.engine.model_source import ModelSource, resolve_model
from antiphon.engine.models.decoder import Decoder
from antiphon.engine.pages import PAGE_TOKENS, KVCache, PagePool
from antiphon.engine.prefix_store import PrefixStore
from antiphon.engine.runner import ModelRunner
from antiphon.kernels import native
from antiphon.kernels.ops import KernelContext, KernelSet
from antiphon.kernels.registry import choose_kernels
from antiphon.loaded_model import LoadedModel
from antiphon.memory_plan import MemoryPlan, new_ledger, plan_memory
from antiphon.precision import Precision, choose_precision
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.core import Core
from antiphon.scheduler.lane import Eviction, Lane
from antiphon.scheduler.residency import Tiers
from antiphon.tiering import build_tiers

WrapKernels = Callable[[KernelSet], KernelSet]

# Of pages and of the kernels' sums: to be raised by every change after which a kept state has other bits.
_LAYOUT_VERSION = 1


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made of. `threads` is the process's number of threads of computation (None: the native
    kernels' own, the physical cores unless set before); `memory_bytes` is the whole budget (None: what is free);
    `host_memory_bytes` of it hold prefixes that do not fit the worker's pool, as int8: lossy, so 0 by default;
    `disk_memory_bytes` hold them, and saved corpora, on the disk (None: half of what is free there; 0: none).
    `eviction` is "sweep", or "lru" to compare with; `speculation` drafts what replies quote of their shards: the same
    tokens, sooner. `trace` is a file to write what runs when into (`scheduler/trace.py`). `step_tokens` bounds one
    batch; what `dtype`, `quantization` and `kv_cache_dtype` mean is said by `choose_precision`."""

    worker: str = "qwen2.5-coder-0.5b"
    driver: str = "qwen2.5-coder-1.5b"
    worker_revision: str | None = None
    driver_revision: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    threads: int | None = None
    memory_bytes: int | None = None
    host_memory_bytes: int = 0
    disk_memory_bytes: int | None = None
    eviction: Eviction = "sweep"
    speculation: bool = True
    step_tokens: int = 1024
    trace: Path | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        choose_precision(self.dtype, self.quantization, self.kv_cache_dtype)  # refuses what cannot be served
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads must be at least 1, got {self.threads}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise InputError(f"memory must be positive, got {self.memory_bytes} bytes")
        for name, value in (("host", self.host_memory_bytes), ("disk", self.disk_memory_bytes)):
            if value is not None and value < 0:
                raise InputError(f"{name} memory must not be negative, got {value} bytes")
        if self.eviction not in get_args(Eviction):
            raise InputError(f"eviction must be one of {get_args(Eviction)}, got {self.eviction!r}")
        if self.step_tokens < 1:
            raise InputError(f"step_tokens must be at least 1, got {self.step_tokens}")

    @property
    def precision(self) -> Precision:
        """What activations, matrices, and keys and values are kept in."""
        return choose_precision(self.dtype, self.quantization, self.kv_cache_dtype)


@dataclass(frozen=True)
class Assembly:
    """A started core with its models; `driver` is `worker` where one model plays both roles."""

    core: Core
    worker: LoadedModel
    driver: LoadedModel
    ledger: Ledger


def assemble(
    options: EngineOptions,
    on_loaded: Callable[[str, str, float], None],
    *,
    roles: int = 2,
    wrap_kernels: WrapKernels | None = None,
) -> Assembly:
    """Loads what `options` names and starts the core. `on_loaded(role, name, seconds)` is called after each model.
    With `roles` 1 only the worker is loaded and plays both. `wrap_kernels` may put something around the kernels."""
    set_threads(options.threads)
    worker_source = resolve_model(options.worker, revision=options.worker_revision)
    driver_source = worker_source
    if roles == 2:
        driver_source = resolve_model(options.driver, revision=options.driver_revision)
    shared = driver_source.fingerprint == worker_source.fingerprint
    ledger, plan = divide_memory(options, worker_source, driver_source)
    tiers = build_tiers(options.host_memory_bytes, options.disk_memory_bytes)
    parts = {"worker": _load("worker", worker_source, plan.worker_pages, options, on_loaded, wrap_kernels, tiers)}
    if not shared:
        parts["driver"] = _load("driver", driver_source, plan.driver_pages, options, on_loaded, wrap_kernels)
    core = Core({role: part.lane for role, part in parts.items()})
    models = {role: part.model(core) for role, part in parts.items()}
    core.start()
    return Assembly(core, models["worker"], models.get("driver", models["worker"]), ledger)


def divide_memory(options: EngineOptions, worker: ModelSource, driver: ModelSource) -> tuple[Ledger, MemoryPlan]:
    """Books the whole budget before anything is allocated; raises `CapacityError` where it cannot fit."""
    ledger = new_ledger(options.memory_bytes)
    driver_config = None if driver.fingerprint == worker.fingerprint else driver.config
    plan = plan_memory(
        ledger, worker.config, driver_config, options.precision, options.step_tokens, options.host_memory_bytes
    )
    return ledger, plan


def set_threads(threads: int | None) -> None:
    """Gives the native kernels' pool and torch `threads` threads; None leaves the pool's and gives torch as many."""
    if native.available() is None:
        if threads is not None:
            native.set_num_threads(threads)
        threads = native.num_threads()
    if threads is not None:
        torch.set_num_threads(threads)


def prefix_fingerprint(source: ModelSource, precision: Precision, folding: str) -> str:
    """All that determines a prefix's bits beside its tokens: the model, what it is computed in, what is folded into its
    weights, and by which kernels; and how pages are laid out, since states are kept on the disk."""
    kernels = f"native {native.isa()}" if native.available() is None else f"torch {torch.__version__}"
    parts = [source.fingerprint, str(precision), *([folding] if folding else []), kernels, f"layout {_LAYOUT_VERSION}"]
    return "|".join(parts)


@dataclass(frozen=True)
class _Part:
    """A loaded model before the core is there."""

    source: ModelSource
    lane: Lane
    decoder: Decoder
    cache: KVCache

    def model(self, core: Core) -> LoadedModel:
        tokenizer = self.source.tokenizer()
        compiler = GrammarCompiler(tokenizer, min(tokenizer.vocab_size, self.source.config.vocab_size))
        capacity = self.lane.store.pool.num_pages * PAGE_TOKENS
        return LoadedModel(
            name=self.source.name,
            config=self.source.config,
            tokenizer=tokenizer,
            chat=ChatFormat(tokenizer),
            client=LaneClient(core, self.lane, compiler),
            max_context_tokens=min(self.source.config.max_position, capacity),
            weight_bytes=self.decoder.num_bytes,
            pool_bytes=self.cache.num_bytes,
        )


def _load(
    role: str,
    source: ModelSource,
    num_pages: int,
    options: EngineOptions,
    on_loaded: Callable[[str, str, float], None],
    wrap_kernels: WrapKernels | None,
    tiers: Tiers | None = None,
) -> _Part:
    started = time.perf_counter()
    precision = options.precision
    kernels = choose_kernels(
        KernelContext("cpu", precision.activations, precision.weights, precision.kv, source.config.head_dim)
    )
    kernels = kernels if wrap_kernels is None else wrap_kernels(kernels)
    with source.open() as checkpoint:
        decoder = Decoder.load(source.config, kernels, checkpoint, precision.activations, precision.weights)
    cache = KVCache(source.config, num_pages, precision.kv, kernels, poison=options.debug)
    store = PrefixStore(PagePool(num_pages), cache, prefix_fingerprint(source, precision, decoder.folding))
    tokenizer = source.tokenizer()
    runner = ModelRunner(decoder, cache, tokenizer.vocab_size)
    lane = Lane(
        role,
        runner,
        store,
        tokenizer.eos_ids,
        step_tokens=options.step_tokens,
        tiers=tiers,
        eviction=options.eviction,
        speculation=options.speculation,
    )
    on_loaded(role, source.name, time.perf_counter() - started)
    return _Part(source, lane, decoder, cache)
