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
    """What waits for each shard of one corpus, and where the sweep stands. It goes from one end of the corpus to the
    other, past shards for which nothing waits, and turns where nothing waits ahead any more::

        | on return | _here leaves now | ahead: _next .. end |      _step is +1 or -1

    Work of one shard leaves in the order in which it came. What comes for a shard while the sweep is there waits for
    the return: the sweep always moves on. So nothing starves: of n shards, work leaves after the sweep has passed
    exactly `next_use` of its shard places, at most 2 (n - 1), whatever comes or leaves meanwhile.

    Reading the shards in their order was the first sweep, so the next one begins at the last of them. `alternates`
    False starts every sweep at the first shard, as a scan under least recently used does (at most n places)."""

    def __init__(self, keys: Sequence[Hashable], *, alternates: bool = True) -> None:
        self._index = {key: index for index, key in enumerate(keys)}
        self._waiting: list[deque[W]] = [deque() for _ in keys]
        self._here: deque[W] = deque()
        self._num_waiting = 0
        self._alternates = alternates
        self._step = -1 if alternates else 1
        self._next = len(keys) - 1 if alternates else 0
        self._begun = False

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[W]:
        """All that waits, in the order in which it leaves if nothing more comes."""
        yield from self.before_turn()
        yield from self.after_turn()

    @property
    def shard_keys(self) -> tuple[Hashable, ...]:
        """The shards' keys, each once."""
        return tuple(self._index)

    @property
    def begun(self) -> bool:
        """Whether something has left in this sweep. False where the last one has ended: all that waits is ahead."""
        return self._begun

    def before_turn(self) -> Iterator[W]:
        """What leaves in this sweep, in its order."""
        yield from self._here
        for place in self._ahead():
            yield from self._waiting[place]

    def after_turn(self) -> Iterator[W]:
        """What leaves on the return, in its order."""
        for place in self._on_return():
            yield from self._waiting[place]

    def add(self, key: Hashable, work: W) -> None:
        """Work for one shard."""
        self._waiting[self._index[key]].append(work)
        self._num_waiting += 1

    def remove(self, work: W) -> bool:
        """Takes work out, wherever it waits; False where it does not."""
        for queue in (self._here, *self._waiting):
            if work in queue:
                queue.remove(work)
                self._num_waiting -= 1
                self._turn_at_end()
                return True
        return False

    def pop(self) -> W:
        """Takes out what leaves next, and moves the sweep there; raises `IndexError` where nothing waits."""
        if not self._num_waiting:
            raise IndexError("sweep: nothing waits")
        if not self._here:
            place = next(place for place in self._ahead() if self._waiting[place])
            self._here, self._waiting[place] = self._waiting[place], self._here
            self._next, self._begun = place + self._step, True
        self._num_waiting -= 1
        work = self._here.popleft()
        self._turn_at_end()
        return work

    def next_use(self, key: Hashable) -> float:
        """How many places the sweep passes before it comes to this shard: exact where work waits for it. Else it is
        foreseen in the next round, which comes after those under way: on the return."""
        place = self._index.get(key)
        if place is None:
            return NEVER[0]
        stands = self._next - self._step if self._begun else self._next
        if self.comes_before_turn(key):
            return abs(place - stands)
        if not self._alternates:
            return len(self._waiting) - stands + place
        return abs(self._end - stands) + abs(self._end - place)

    def comes_before_turn(self, key: Hashable) -> bool:
        """Whether the sweep comes to this shard before it turns, as far as is known; where nothing waits at all, the
        round that is foreseen takes every shard."""
        place = self._index[key]
        if place == self._next - self._step:
            return bool(self._here)
        return not self._num_waiting or ((place - self._next) * self._step >= 0 and bool(self._waiting[place]))

    def waits(self, key: Hashable) -> bool:
        """Whether work waits for this shard."""
        place = self._index.get(key)
        if place is None:
            return False
        return bool(self._waiting[place]) or (place == self._next - self._step and bool(self._here))

    @property
    def _end(self) -> int:
        return len(self._waiting) - 1 if self._step > 0 else 0

    def _ahead(self) -> range:
        """Places to come before the sweep turns."""
        return range(self._next, self._end + self._step, self._step)

    def _on_return(self) -> range:
        """The other places, in the order in which they come after the turn."""
        if not self._alternates:
            return range(self._next)
        return range(self._next - self._step, len(self._waiting) - 1 - self._end - self._step, -self._step)

    def _turn_at_end(self) -> None:
        if not self._begun or self._here or any(self._waiting[place] for place in self._ahead()):
            return
        self._begun = False
        if self._alternates:
            self._next, self._step = self._end, -self._step
        else:
            self._next = 0


class Sweeps(Generic[W]):
    """The sweeps of all corpora, which take turns: a turn is one sweep, to its end; then comes the corpus whose work
    has waited longest. So work waits for at most one sweep of every other corpus and what `Sweep` promises of its own,
    2 (n - 1) places: it leaves in the present turn of its corpus or in the next.

    The corpora with work stand in the queue `_turns` with rising numbers, the one that sweeps now in front."""

    def __init__(self) -> None:
        self._sweeps: dict[Hashable, Sweep[W]] = {}
        self._corpora_of: dict[Hashable, list[Hashable]] = {}  # of each shard's key
        self._turns: dict[Hashable, int] = {}
        self._last_turns: dict[Hashable, int] = {}  # of corpora without work
        self._num_turns = 0

    def open(self, corpus: Hashable, keys: Sequence[Hashable], *, alternates: bool = True) -> None:
        """Makes a corpus known, with its shards' keys in their order. One that is open is closed first."""
        self.close(corpus)
        self._sweeps[corpus] = Sweep(keys, alternates=alternates)
        self._last_turns[corpus] = self._num_turns
        for key in dict.fromkeys(keys):
            self._corpora_of.setdefault(key, []).append(corpus)

    def __contains__(self, corpus: Hashable) -> bool:
        return corpus in self._sweeps

    def close(self, corpus: Hashable) -> list[W]:
        """Forgets a corpus; what still waited for it, in the order in which it would have left."""
        sweep = self._sweeps.pop(corpus, None)
        if sweep is None:
            return []
        self._turns.pop(corpus, None)
        self._last_turns.pop(corpus, None)
        for key in sweep.shard_keys:
            self._corpora_of[key].remove(corpus)
            if not self._corpora_of[key]:
                del self._corpora_of[key]
        return list(sweep)

    def __len__(self) -> int:
        return sum(len(self._sweeps[corpus]) for corpus in self._turns)

    def __iter__(self) -> Iterator[W]:
        """All that waits, in the order in which it leaves if nothing more comes."""
        for corpus in self._turns:
            yield from self._sweeps[corpus].before_turn()
        for corpus in self._turns:
            yield from self._sweeps[corpus].after_turn()

    def add(self, corpus: Hashable, key: Hashable, work: W) -> None:
        """Work for one shard of one corpus."""
        self._sweeps[corpus].add(key, work)
        if corpus not in self._turns:
            self._last_turns.pop(corpus)
            self._queue(corpus)

    def remove(self, work: W) -> bool:
        """Takes work out, wherever it waits; False where it does not."""
        for corpus in self._turns:
            sweep = self._sweeps[corpus]
            begun = sweep.begun
            if sweep.remove(work):
                if not sweep or sweep.begun != begun:
                    self._end_turn(corpus)
                return True
        return False

    def head(self) -> W | None:
        """What leaves next."""
        return next(iter(self), None)

    def pop(self) -> W:
        """Takes out what leaves next; raises `IndexError` where nothing waits."""
        corpus = next(iter(self._turns), None)
        if corpus is None:
            raise IndexError("sweeps: nothing waits")
        work = self._sweeps[corpus].pop()
        if not self._sweeps[corpus].begun:
            self._end_turn(corpus)
        return work

    def next_use(self, key: Hashable) -> NextUse:
        """When a prefix is used next: the number of the turn (present ones, then those on the return, then foreseen
        ones of corpora without work, what ended last first), and the places that its sweep passes before. Nothing
        comes sooner than the shard of what leaves next."""
        return min((self._next_use(corpus, key) for corpus in self._corpora_of.get(key, ())), default=NEVER)

    def waits(self, key: Hashable) -> bool:
        """Whether work waits for this prefix."""
        return any(self._sweeps[corpus].waits(key) for corpus in self._corpora_of.get(key, ()))

    def _next_use(self, corpus: Hashable, key: Hashable) -> NextUse:
        sweep = self._sweeps[corpus]
        turn = self._turns.get(corpus)
        if turn is None:
            turn = 3 * self._num_turns - self._last_turns[corpus]
        elif not sweep.comes_before_turn(key):
            turn += self._num_turns
        return turn, sweep.next_use(key)

    def _queue(self, corpus: Hashable) -> None:
        self._num_turns += 1
        self._turns[corpus] = self._num_turns

    def _end_turn(self, corpus: Hashable) -> None:
        turn = self._turns.pop(corpus)
        if self._sweeps[corpus]:
            self._queue(corpus)
        else:
            self._last_turns[corpus] = turn
