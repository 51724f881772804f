"""Which declared prefixes are in the pool, and how the others come back: from a tier below it, or by reading again.

Movement runs on threads of its own, ahead of the sweep; the core's thread reserves the pages and is told when a state
has arrived. A prefix whose state cannot be fetched, or is cheaper to compute, is read again from its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from antiphon.engine.errors import CapacityError
from antiphon.engine.pages import num_pages_for
from antiphon.engine.prefix_store import Prefix, PrefixStore
from antiphon.engine.sampling_params import SamplingParams
from antiphon.engine.tiers import PrefixState, Tier, TierError
from antiphon.scheduler.counters import Counters
from antiphon.scheduler.row import Row, RowKind, RowResult
from antiphon.scheduler.waiting import Waiting

# Copies of states that wait to be put into a tier; beyond this the core waits for the tier.
_MAX_LEAVING_BYTES = 256 << 20
# A double buffer: while rows over one prefix run, the next ones come.
_LOOK_AHEAD = 2
_RATE_WEIGHT = 0.2  # of the newest measurement in a running mean

# Told of each movement, on the thread that moves: "fetch" or "put", when it started, and how many bytes it moved.
OnMove = Callable[[str, float, int], None]
Post = Callable[[Callable[[], None]], None]


class Host(Protocol):
    """Whose rows they are: the lane."""

    def submit(self, row: Row, *, first: bool = False) -> None:
        """Takes a row; `first` puts it before the others of its kind."""
        ...

    def fail_waiting(self, prefix: Prefix, error: Exception) -> None:
        """Ends the rows that wait for a prefix which cannot be brought."""
        ...


@dataclass(frozen=True)
class Tiers:
    """What is below the pool. What is evicted goes to the first of `below` that takes it; `saved` outlives the process
    and only gets what is asked to be saved. Both are fetched from."""

    below: Sequence[Tier] = ()
    saved: Tier | None = None

    def all(self) -> list[Tier]:
        """Every tier, the fastest first."""
        return [*self.below, *([] if self.saved is None else [self.saved])]


@dataclass
class _Moves:
    """What is under way."""

    fetching: dict[bytes, list[int]] = field(default_factory=dict)  # pages that a state is copied into
    reading: dict[bytes, Row] = field(default_factory=dict)
    leaving: dict[bytes, PrefixState] = field(default_factory=dict)
    puts: set[Future[None]] = field(default_factory=set)


def own_thread(name: str) -> Executor:
    """One thread, on which what is handed in runs in order."""
    return ThreadPoolExecutor(1, name)


class Residency:
    """Only the core's thread calls it, but for what it hands to its own threads (`executor` makes them by name, one for
    each direction). `post` runs a function on the core's thread, and is set when there is one."""

    def __init__(
        self,
        store: PrefixStore,
        waiting: Waiting,
        counters: Counters,
        tiers: Tiers,
        host: Host,
        *,
        clock: Callable[[], float] = time.monotonic,
        executor: Callable[[str], Executor] = own_thread,
    ) -> None:
        self._store = store
        self._waiting = waiting
        self._counters = counters
        self._tiers = tiers
        self._host = host
        self._moves = _Moves()
        self._unfetchable: set[bytes] = set()
        self._seconds_per_byte: float | None = None
        self._seconds_per_token: float | None = None
        self._clock = clock
        self.on_move: OnMove | None = None
        self._fetcher, self._putter = executor("antiphon-fetch"), executor("antiphon-put")
        self.post: Post = lambda work: work()
        self.spare_pages = spare_pages(store.pool.num_pages)
        store.on_leave, store.on_drop = self._leave, self._drop

    @property
    def is_fetching(self) -> bool:
        """Whether a state is on its way into the pool."""
        return bool(self._moves.fetching)

    def holders(self) -> list[Sequence[int]]:
        """Pages that are reserved for states on their way, for `check_integrity`."""
        return list(self._moves.fetching.values())

    def knows(self, key: bytes) -> bool:
        """Whether a tier has the state of this key."""
        return key in self._moves.leaving or any(tier.has(key) for tier in self._tiers.all())

    def is_saved(self, key: bytes) -> bool:
        """Whether the saved tier has the state of this key."""
        return self._tiers.saved is not None and self._tiers.saved.has(key)

    def bring(self, prefix: Prefix, *, ahead: bool = False) -> None:
        """Starts to bring an absent prefix into the pool; nothing happens where it is coming already. `ahead`: only by
        fetching it. Raises `CapacityError` where there is no room, `AntiphonError` where it was released."""
        key = prefix.key
        if self._store.is_resident(prefix) or key in self._moves.fetching or key in self._moves.reading:
            return
        source = self._source(prefix)
        if source is not None:
            pages = self._store.make_room(prefix, spare=self.spare_pages, spared=self.sooner_than(prefix))
            self._moves.fetching[key] = pages
            self._fetcher.submit(self._fetch, prefix, pages, source)
        elif not ahead:
            self._read_again(prefix)

    def look_ahead(self) -> None:
        """Fetches the prefixes that the sweeps come to next, as far as that takes no pages from sooner ones."""
        if not self._tiers.all():
            return
        try:
            for prefix in self._waiting.upcoming(_LOOK_AHEAD):
                if self._store.is_declared(prefix):
                    self.bring(prefix, ahead=True)
        except CapacityError:
            return

    def sooner_than(self, prefix: Prefix) -> Callable[[bytes], bool]:
        """Names the prefixes that must not make way for this one: those that are needed no later."""
        use = self._waiting.next_use(prefix.key)
        return lambda key: self._waiting.next_use(key) <= use

    def save(self, prefix: Prefix) -> Future[None]:
        """Puts the state of a prefix in the pool into the saved tier; its error (`TierError`) comes in the future."""
        saved = self._tiers.saved
        if saved is None:
            raise TierError("there is no saved tier to save a prefix into")
        if self.is_saved(prefix.key):
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._put(saved, self._store.copy_state(prefix))

    def measured_read(self, num_tokens: int, seconds: float) -> None:
        """A step read this many tokens: what reading again costs."""
        self._seconds_per_token = _mean(self._seconds_per_token, seconds / num_tokens)

    def close(self) -> None:
        """Ends all movement; waits for what is under way."""
        self._fetcher.shutdown(wait=True, cancel_futures=True)
        self._putter.shutdown(wait=True)
        for tier in self._tiers.all():
            tier.close()

    def _source(self, prefix: Prefix) -> PrefixState | Tier | None:
        """Where to fetch a prefix from; None where it is to be read again."""
        if prefix.key in self._moves.leaving:
            return self._moves.leaving[prefix.key]
        if prefix.key in self._unfetchable:
            return None
        tier = next((tier for tier in self._tiers.all() if tier.has(prefix.key)), None)
        return None if tier is None or self._reading_is_cheaper(prefix) else tier

    def _reading_is_cheaper(self, prefix: Prefix) -> bool:
        if self._seconds_per_byte is None or self._seconds_per_token is None:
            return False
        num_tokens = prefix.num_tokens - (0 if prefix.parent is None else prefix.parent.num_tokens)
        num_bytes = num_pages_for(num_tokens) * self._store.cache.num_bytes / self._store.pool.num_pages
        return num_tokens * self._seconds_per_token < num_bytes * self._seconds_per_byte

    def _fetch(self, prefix: Prefix, pages: list[int], source: PrefixState | Tier) -> None:
        """On the fetching thread: a state from its tier into its pages, which nobody else uses yet."""
        error: Exception | None = None
        num_bytes, started = 0, self._clock()
        try:
            state = source if isinstance(source, PrefixState) else source.fetch(prefix.key)
            if state.token_ids != prefix.token_ids or state.num_shared_pages != prefix.num_shared_pages:
                raise TierError(f"the state of a prefix of {prefix.num_tokens} tokens belongs to other tokens")
            self._store.cache.copy_in(pages[prefix.num_shared_pages :], state.tensors)
            num_bytes = state.num_bytes
        except Exception as caught:  # whatever went wrong, the prefix can be read again
            error = caught
        seconds = self._clock() - started
        self._moved("fetch", started, num_bytes)
        self.post(partial(self._arrived, prefix, num_bytes, seconds, error))

    def _arrived(self, prefix: Prefix, num_bytes: int, seconds: float, error: Exception | None) -> None:
        pages = self._moves.fetching.pop(prefix.key)
        if error is not None:
            self._counters.tier_failures += 1
            self._unfetchable.add(prefix.key)
            self._store.release(pages)
            return
        self._seconds_per_byte = _mean(self._seconds_per_byte, seconds / max(1, num_bytes))
        self._counters.shards_fetched += 1
        self._counters.bytes_fetched += num_bytes
        self._counters.fetch_seconds += seconds
        self._store.restore(prefix, pages)

    def _read_again(self, prefix: Prefix) -> None:
        if prefix.key not in self._unfetchable and self.knows(prefix.key):
            self._counters.shards_cheaper_to_read += 1
        params = SamplingParams(max_new_tokens=0)
        row = Row(RowKind.READ, list(prefix.token_ids), params, prefix=prefix.parent, restores=prefix)
        self._moves.reading[prefix.key] = row
        row.future.add_done_callback(partial(self._was_read, prefix))
        self._host.submit(row, first=True)

    def _was_read(self, prefix: Prefix, done: Future[RowResult]) -> None:
        del self._moves.reading[prefix.key]
        error = done.exception()
        if isinstance(error, Exception):
            self._host.fail_waiting(prefix, error)
            return
        self._counters.shards_read_again += 1
        self._counters.tokens_read_again += done.result().prefill_tokens
        self._unfetchable.discard(prefix.key)

    def _leave(self, prefix: Prefix) -> None:
        """A prefix is about to lose its pages: its state goes below, where it is not there yet."""
        self._counters.shards_evicted += 1
        if self._tiers.below and not self.knows(prefix.key):
            state = self._store.copy_state(prefix)
            self._moves.leaving[prefix.key] = state
            self._put(None, state)

    def _drop(self, key: bytes) -> None:
        """A prefix was released: nothing below the pool needs its state any more."""
        self._unfetchable.discard(key)
        for tier in self._tiers.below:
            self._putter.submit(tier.drop, key)  # behind its put

    def _put(self, tier: Tier | None, state: PrefixState) -> Future[None]:
        """Hands a state to the putting thread; waits where too many are on their way."""
        while self._moves.puts and len(self._moves.puts) * state.num_bytes > _MAX_LEAVING_BYTES:
            started = self._clock()
            done, _ = wait(self._moves.puts, return_when="FIRST_COMPLETED")
            self._moves.puts -= done
            self._counters.tier_waits_seconds += self._clock() - started
        put = self._putter.submit(self._put_now, tier, state)
        self._moves.puts.add(put)
        return put

    def _put_now(self, tier: Tier | None, state: PrefixState) -> None:
        """On the putting thread: into `tier`, or (None) into the first one below the pool that takes it."""
        started, num_bytes = self._clock(), 0
        try:
            if tier is not None:
                tier.put(state)
            else:
                _put_below(self._tiers.below, state)
            num_bytes = state.num_bytes
        finally:
            self._moved("put", started, num_bytes)
            self.post(partial(self._left, state.key, num_bytes > 0))

    def _moved(self, kind: str, started: float, num_bytes: int) -> None:
        if self.on_move is not None:
            self.on_move(kind, started, num_bytes)

    def _left(self, key: bytes, kept: bool) -> None:
        self._counters.tier_failures += not kept
        self._moves.leaving.pop(key, None)
        self._moves.puts = {put for put in self._moves.puts if not put.done()}


def spare_pages(num_pages: int) -> int:
    """Pages of a pool that stay free for rows when prefixes come in: without them, a row would evict a prefix that
    others wait for."""
    return num_pages // 8


def _put_below(tiers: Sequence[Tier], state: PrefixState) -> None:
    for tier in tiers[:-1]:
        try:
            return tier.put(state)
        except TierError:
            continue
    return tiers[-1].put(state)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - _RATE_WEIGHT) * mean + _RATE_WEIGHT * value
