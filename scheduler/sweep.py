"""In which order the shards of a corpus are visited: sweeps whose direction alternates.

A round over more shards than fit the pool starts where the last one ended, so that what is still there is used first;
queries that arrive while a sweep is under way join it, and are completed on its return (an elevator over shards).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from antiphon.engine.eviction import NEVER, NextUse

W = TypeVar("W")


class Sweep(Generic[W]):
    """What waits for each shard of one corpus, and where the sweep stands. Work of one shard leaves in the order in
    which it came. What comes for a shard while the sweep is there waits for the return: the sweep always moves on.
    Reading the shards in their order was the first sweep, so the next one begins at the last of them.

    `alternates` False starts every sweep at the first shard, as a scan under least recently used does."""

    def __init__(self, keys: Sequence[Hashable], *, alternates: bool = True) -> None:
        self._index = {key: index for index, key in enumerate(keys)}
        self._waiting: list[deque[W]] = [deque() for _ in keys]
        self._num_waiting = 0
        self._alternates = alternates
        self._place = max(0, len(keys) - 1) if alternates else 0
        self._step = 1
        self._left: int | None = None  # what may still leave here; None until something left here in this sweep

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[W]:
        """All that waits, in the order in which it would leave if nothing more came."""
        for place in (*self._ahead(), *self._on_return()):
            yield from self._waiting[place]

    @property
    def turns_next(self) -> bool:
        """Whether nothing waits ahead in the present direction: the sweep ends here."""
        return not any(self._waiting[place] for place in self._ahead())

    def add(self, key: Hashable, work: W) -> None:
        """Work for one shard."""
        self._waiting[self._index[key]].append(work)
        self._num_waiting += 1

    def remove(self, work: W) -> bool:
        """Takes work out, wherever it waits; False where it does not."""
        for queue in self._waiting:
            if work in queue:
                queue.remove(work)
                self._num_waiting -= 1
                return True
        return False

    def pop(self) -> W:
        """Takes out what leaves next, and moves the sweep there; raises `IndexError` where nothing waits."""
        if not self._num_waiting:
            raise IndexError("sweep: nothing waits")
        place = next((place for place in self._ahead() if self._waiting[place]), None)
        if place is None:
            place = next(place for place in self._on_return() if self._waiting[place])
            self._step = -self._step if self._alternates else self._step
            self._left = None
        if place != self._place or self._left is None:
            self._place, self._left = place, len(self._waiting[place])
        self._left -= 1
        self._num_waiting -= 1
        work = self._waiting[place].popleft()
        if not self._num_waiting:
            self._left = None
            self._place = place if self._alternates else 0
        return work

    def next_use(self, key: Hashable) -> float:
        """How many places the sweep passes before it comes to this shard, if every shard is visited in every sweep."""
        place = self._index.get(key)
        if place is None:
            return NEVER[0]
        leaves_here = place == self._place and self._left != 0 and bool(self._waiting[place])
        if leaves_here or (place - self._place) * self._step > 0:
            return abs(place - self._place)
        if not self._alternates:
            return len(self._waiting) - self._place + place
        return abs(self._end - self._place) + abs(self._end - place)

    def waits(self, key: Hashable) -> bool:
        """Whether work waits for this shard."""
        place = self._index.get(key)
        return place is not None and bool(self._waiting[place])

    @property
    def _end(self) -> int:
        return len(self._waiting) - 1 if self._step > 0 else 0

    def _ahead(self) -> range:
        """Places from where the sweep stands to its end."""
        first = self._place + self._step if self._left == 0 else self._place
        return range(first, self._end + self._step, self._step)

    def _on_return(self) -> range:
        """The other places, in the order in which they come after the sweep's end."""
        last_passed = self._place if self._left == 0 else self._place - self._step
        if not self._alternates:
            return range(last_passed + 1)
        return range(last_passed, len(self._waiting) - 1 - self._end - self._step, -self._step)


class Sweeps(Generic[W]):
    """The sweeps of all corpora. One is active until it turns; then the one whose work has waited longest is."""

    def __init__(self) -> None:
        self._sweeps: dict[Hashable, Sweep[W]] = {}
        self._since: dict[Hashable, int] = {}  # the arrival of the oldest work since the corpus was last active
        self._active: Hashable | None = None
        self._clock = 0

    def open(self, corpus: Hashable, keys: Sequence[Hashable], *, alternates: bool = True) -> None:
        """Makes a corpus known, with its shards' keys in their order."""
        self._sweeps[corpus] = Sweep(keys, alternates=alternates)

    def close(self, corpus: Hashable) -> None:
        """Forgets a corpus; its work must have left."""
        self._sweeps.pop(corpus, None)
        self._since.pop(corpus, None)
        if self._active == corpus:
            self._active = None

    def __len__(self) -> int:
        return sum(len(sweep) for sweep in self._sweeps.values())

    def __iter__(self) -> Iterator[W]:
        for corpus in self._in_turn():
            yield from self._sweeps[corpus]

    def add(self, corpus: Hashable, key: Hashable, work: W) -> None:
        """Work for one shard of one corpus."""
        self._clock += 1
        self._since.setdefault(corpus, self._clock)
        self._sweeps[corpus].add(key, work)

    def remove(self, work: W) -> bool:
        """Takes work out, wherever it waits; False where it does not."""
        return any(sweep.remove(work) for sweep in self._sweeps.values())

    def head(self) -> W | None:
        """What leaves next."""
        return next(iter(self), None)

    def pop(self) -> W:
        """Takes out what leaves next; raises `IndexError` where nothing waits."""
        corpus = next((corpus for corpus in self._in_turn() if self._sweeps[corpus]), None)
        if corpus is None:
            raise IndexError("sweeps: nothing waits")
        if corpus != self._active:
            self._active = corpus
            self._since.pop(corpus, None)
        sweep = self._sweeps[corpus]
        work = sweep.pop()
        if not sweep:
            self._since.pop(corpus, None)
        elif sweep.turns_next:
            self._clock += 1
            self._since[corpus] = self._clock
            self._active = None
        return work

    def next_use(self, key: Hashable) -> NextUse:
        """When a prefix is used next: first by whose turn it is, then by its place in that sweep."""
        uses = (
            (float(rank), self._sweeps[corpus].next_use(key))
            for rank, corpus in enumerate(self._in_turn())
            if self._sweeps[corpus].next_use(key) < NEVER[0]
        )
        return min(uses, default=NEVER)

    def waits(self, key: Hashable) -> bool:
        """Whether work waits for this prefix."""
        return any(sweep.waits(key) for sweep in self._sweeps.values())

    def _in_turn(self) -> list[Hashable]:
        """The active corpus, then those with work by how long it has waited, then idle ones."""
        never = self._clock + 1

        def turn(corpus: Hashable) -> tuple[bool, bool, int]:
            busy = bool(self._sweeps[corpus])
            return (not (busy and corpus == self._active), not busy, self._since.get(corpus, never))

        return sorted(self._sweeps, key=turn)
