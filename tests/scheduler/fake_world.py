"""A whole scheduler over a fake model, a fake clock and executors that are stepped: every run of a seed is the same.

The fake model keeps real pages: a token's "key" is its id, its "value" its position. Logits and scores come from
what the block table leads to, so a row whose pages hold anything but its own tokens says something else than `oracle`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from antiphon.engine.batch import Batch
from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import AntiphonError
from antiphon.engine.host_tier import HostTier
from antiphon.engine.pages import PAGE_TOKENS, KVCache, PagePool
from antiphon.engine.prefix_store import Keep, Prefix, PrefixStore
from antiphon.engine.runner import PendingStep, StepOutput
from antiphon.engine.sampling_params import SamplingParams
from antiphon.engine.tiers import PrefixState, TierError
from antiphon.kernels.ops import KernelContext
from antiphon.kernels.registry import choose_kernels
from antiphon.scheduler.core import Core
from antiphon.scheduler.gate import Gate, GateOptions
from antiphon.scheduler.lane import Lane
from antiphon.scheduler.quoted_text import QuotedText
from antiphon.scheduler.residency import Tiers
from antiphon.scheduler.row import FinishReason, Row, RowKind

VOCABULARY = 97
_CONFIG = ModelConfig("fake", 2, 2, 1, 1, 1, 2, VOCABULARY, 1 << 20, 1e-6, 1e4, True, False, False)
_KERNELS = choose_kernels(KernelContext("cpu", torch.float32, torch.float32, torch.float32, 2), only="reference")


def next_token(token_ids: list[int]) -> int:
    """What the fake model says after these tokens."""
    weights = np.arange(1, len(token_ids) + 1, dtype=np.int64) * 31 + 7
    return int((np.asarray(token_ids, dtype=np.int64) * weights).sum() % VOCABULARY)


def oracle(token_ids: list[int], num_new: int) -> tuple[int, ...]:
    """What a row over these tokens must come to."""
    tokens = list(token_ids)
    for _ in range(num_new):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(token_ids) :])


class FakeRunner:
    """Stands in for `ModelRunner`; `fails()` says whether a step fails as a kernel would."""

    kernels = _KERNELS
    num_input_ids = VOCABULARY

    def __init__(self, cache: KVCache, fails: Callable[[], bool]) -> None:
        self._cache = cache
        self._fails = fails

    def launch(self, batch: Batch) -> PendingStep:
        if self._fails():
            raise AntiphonError("a kernel failed")
        slots = torch.from_numpy(batch.slots())
        self._cache.k[0, 0, slots, 0] = torch.from_numpy(batch.token_ids).float()
        self._cache.v[0, 0, slots, 0] = torch.from_numpy(batch.positions).float()
        logits = torch.zeros(len(batch.logit_tokens), VOCABULARY)
        for index, token in enumerate(batch.logit_tokens.tolist()):
            logits[index, next_token(self._context(batch, token))] = 1.0
        scores = [float(-len(self._context(batch, token))) for token in batch.score_tokens.tolist()]
        return PendingStep(StepOutput(logits, torch.tensor(scores)))

    def _context(self, batch: Batch, token: int) -> list[int]:
        """All tokens up to this one, as its row's pages have them."""
        row = int(np.searchsorted(batch.row_starts, token, side="right")) - 1
        positions = np.arange(int(batch.positions[token]) + 1)
        slots = batch.block_tables[row, positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS
        found = torch.from_numpy(slots + positions % PAGE_TOKENS)
        places = self._cache.v[0, 0, found, 0]
        assert torch.equal(places, torch.from_numpy(positions).float()), f"positions {positions[-1]} reads {places}"
        return [int(value) for value in self._cache.k[0, 0, found, 0].tolist()]


class SteppedExecutor(Executor):
    """Runs what it was handed when `run_one` is called."""

    def __init__(self) -> None:
        self.tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks.append((future, lambda: work(*args, **kwargs)))
        return future

    def run_one(self) -> bool:
        if not self.tasks:
            return False
        future, work = self.tasks.popleft()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while not cancel_futures and self.run_one():
            pass


class FlakyTier(HostTier):
    """Host memory that fails now and then: a put, or a fetch, whose state is then gone."""

    def __init__(self, limit_bytes: int, fails: Callable[[], bool]) -> None:
        super().__init__(limit_bytes)
        self._fails = fails

    def put(self, state: PrefixState) -> None:
        if self._fails():
            raise TierError("the disk is full")
        super().put(state)

    def fetch(self, key: bytes) -> PrefixState:
        if self._fails():
            self.drop(key)
            raise TierError("a file was damaged")
        return super().fetch(key)


@dataclass(eq=False)
class FakeCorpus:
    """Shards on their way to be read, and what they became."""

    parent: Prefix
    rows: list[Row]
    prefixes: list[Prefix] = field(default_factory=list)
    released: bool = False


class World:
    """Operations on one lane, chosen by a caller; `failure_rate` is of kernels and of the tier."""

    def __init__(self, seed: int, *, failure_rate: float = 0.02) -> None:
        self.rng = random.Random(seed)
        num_pages = self.rng.randint(8, 24)
        self._failure_rate = failure_rate
        cache = KVCache(_CONFIG, num_pages, torch.float32, _KERNELS, poison=True)
        self.store = PrefixStore(PagePool(num_pages), cache, "fake")
        self.executors = {name: SteppedExecutor() for name in ("antiphon-fetch", "antiphon-put")}
        state_bytes = PAGE_TOKENS * KVCache.token_bytes(_CONFIG, torch.float32)
        tier = FlakyTier(self.rng.choice([0, 6, 60]) * state_bytes, self._fails)
        self.lane = Lane(
            "fake",
            FakeRunner(cache, self._fails),  # type: ignore[arg-type]
            self.store,
            frozenset(),
            step_tokens=self.rng.choice([5, 40, 400]),
            tiers=Tiers([tier]),
            eviction=self.rng.choice(["sweep", "sweep", "lru"]),  # type: ignore[arg-type]
            clock=self._tick,
            executor=self.executors.__getitem__,
        )
        self.core = Core({"fake": self.lane})
        self.rows: list[Row] = []
        self.corpora: list[FakeCorpus] = []
        self._now = 0.0
        self._num_named = 0

    def read_corpus(self) -> None:
        """Submits the shards of a new corpus behind instructions of its own."""
        instructions = self._tokens(1, 80)
        parent_row = Row(RowKind.READ, instructions, SamplingParams(max_new_tokens=0), keep=Keep.PINNED)
        self.lane.submit(parent_row)
        self.settle(failing=False)
        parent = parent_row.future.result().prefix if parent_row.future.exception() is None else None
        if parent is None:
            return
        rows = [
            Row(
                RowKind.READ,
                [*parent.token_ids, *self._tokens(1, 150)],
                SamplingParams(max_new_tokens=0),
                prefix=parent,
                keep=self.rng.choice([Keep.MOVABLE, Keep.MOVABLE, Keep.MOVABLE, Keep.CACHED]),
            )
            for _ in range(self.rng.randint(1, 8))
        ]
        self.corpora.append(FakeCorpus(parent, rows))
        for row in rows:
            self.lane.submit(row)

    def query(self) -> None:
        """Scatters one query over a corpus, behind some gate, or none."""
        corpus = self._corpus()
        if corpus is None:
            return
        prefixes = [prefix for prefix in self._opened(corpus) if self.store.is_declared(prefix)]
        if not prefixes:
            return
        suffix = self._tokens(2, 30)
        params = SamplingParams(max_new_tokens=self.rng.choice([0, 1, 3, 70]))
        options = self.rng.choice(
            [
                None,
                GateOptions("first-token"),
                GateOptions("likelihood", 2),
                GateOptions("both", 1, readers_decode=False),
            ]
        )
        if params.max_new_tokens == 0:
            options = None
        gate = None if options is None else Gate(options, self.lane, range(0, VOCABULARY, 3), len(prefixes))
        for prefix in prefixes:
            row = Row(RowKind.SUFFIX, [*prefix.token_ids, *suffix], params, prefix=prefix, corpus=corpus)
            row.score_start, row.score_stop = prefix.num_tokens + 1, prefix.num_tokens + len(suffix)
            if gate is not None:
                gate.watch(row)
            self._submit(row)

    def turn(self) -> None:
        """A conversation's next turn, or another one's first."""
        owner = self.rng.randint(0, 2)
        before = [row for row in self.rows if row.owner == owner]
        if any(not row.future.done() for row in before):
            return
        history = list(before[-1].future.result().token_ids) if before and not before[-1].future.exception() else []
        row = Row(
            RowKind.DRIVER,
            [*history, *self._tokens(1, 60)],
            SamplingParams(max_new_tokens=self.rng.randint(1, 8)),
            owner=owner,
            use_cached=True,
        )
        self._submit(row)

    def abort(self) -> None:
        """Ends some rows, wherever they are."""
        self.lane.abort(self.rng.sample(self.rows, min(len(self.rows), self.rng.randint(1, 5))))

    def release(self) -> None:
        """Gives up a corpus, whatever still runs over it."""
        corpus = self._corpus()
        if corpus is None or any(not row.future.done() for row in corpus.rows):
            return
        self._opened(corpus)
        corpus.released = True
        self.lane.close_corpus(corpus)
        for prefix in (*corpus.prefixes, corpus.parent):
            self.store.disuse(prefix)

    def drop_owner(self) -> None:
        """Ends a conversation."""
        self.lane.drop_kept(self.rng.randint(0, 2))

    def step(self) -> None:
        """One step of the core, then what was posted to it."""
        self.core._drain()
        self.core._step()
        self.check()

    def move(self) -> None:
        """One movement between the pool and the tier."""
        self.executors[self.rng.choice(list(self.executors))].run_one()
        self.core._drain()
        self.check()

    def check(self) -> None:
        """Every page is accounted for, and every row that ended says what it must."""
        self.lane.check_integrity()

    def settle(self, *, failing: bool = True) -> None:
        """Runs until nothing is left to do."""
        rate, self._failure_rate = self._failure_rate, self._failure_rate if failing else 0.0
        for _ in range(20_000):
            moved = sum(executor.run_one() for executor in self.executors.values())
            self.core._drain()
            stepped = self.core._step()
            if not moved and not stepped and self.core._inbox.empty():
                self._failure_rate = rate
                self.check()
                return
        raise AssertionError(f"the core does not come to rest: {[row.phase for row in self.lane._rows()]}")

    def finish(self) -> None:
        """Every row has ended, rightly or with an error; all that is given up frees every page."""
        self.settle()
        for row in self.rows:
            assert row.future.done(), "a row never ended"
            if row.future.exception() is None:
                self._check_result(row)
        for corpus in [corpus for corpus in self.corpora if not corpus.released]:
            self._opened(corpus)
            self.lane.close_corpus(corpus)
            for prefix in (*corpus.prefixes, corpus.parent):
                self.store.disuse(prefix)
        for owner in range(3):
            self.lane.drop_kept(owner)
        self.store.clear_cached()
        self.settle()
        assert self.store.pool.num_free == self.store.pool.num_pages, "pages outlived their owners"
        assert self.store.cache.k.isnan().all(), "freed pages are not poisoned"

    def _check_result(self, row: Row) -> None:
        result = row.future.result()
        new = len(result.new_token_ids)
        start = len(result.token_ids) - new
        assert result.new_token_ids == oracle(list(result.token_ids[:start]), new)
        if result.finish_reason is FinishReason.LENGTH:
            assert new == row.params.max_new_tokens
        if result.mean_score is not None and row.prefix is not None:
            wanted = range(row.prefix.num_tokens + 1, row.prefix.num_tokens + 1 + len(row.scores))
            assert row.scores == [float(-length) for length in wanted] or not row.score_stop

    def _submit(self, row: Row) -> None:
        """Half of the rows quote what they will say, with a wrong token here and there."""
        if self.rng.random() < 0.5:
            reply = oracle(row.token_ids, row.params.max_new_tokens)
            row.quotes = QuotedText([token if self.rng.random() < 0.9 else 0 for token in reply])
        self.rows.append(row)
        self.lane.submit(row)

    def _opened(self, corpus: FakeCorpus) -> list[Prefix]:
        """The shards that were read, whose sweeps are open from the first query on."""
        if not corpus.prefixes and all(row.future.done() for row in corpus.rows):
            results = [row.future.result() for row in corpus.rows if row.future.exception() is None]
            corpus.prefixes = [result.prefix for result in results if result.prefix is not None]
            self.lane.open_corpus(corpus, corpus.prefixes)
        return corpus.prefixes

    def _corpus(self) -> FakeCorpus | None:
        there = [corpus for corpus in self.corpora if not corpus.released]
        return self.rng.choice(there) if there else None

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(least, most))]

    def _fails(self) -> bool:
        return self.rng.random() < self._failure_rate

    def _tick(self) -> float:
        self._now += 0.001
        return self._now
