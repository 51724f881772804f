"""Orders and eviction rules without a model: the engine's own classes, driven by questions that ask in rounds.

A **visit** is the work of one shard that leaves together; a visited shard that is not in the pool is read again. Time
is counted in visits. All shards have been read, one after the other, before the first question comes.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count

from antiphon.engine.errors import InputError
from antiphon.engine.eviction import NEVER, EvictionPolicy, FurthestNextUse, LeastRecentlyUsed, NextUse
from antiphon.scheduler.sweep import Sweeps

Shard = tuple[int, int]  # corpus, index
_Work = tuple[int, Shard]  # question, shard


class Order(Enum):
    """In which order a round visits its shards."""

    SCAN = "scan"  # from the first to the last, every time
    SWEEP = "sweep"  # in alternating direction


class Rule(Enum):
    """Which shard leaves the pool."""

    LRU = "LRU"
    PREDICTED = "predicted"  # the next use that `Sweeps` foresees
    BELADY = "Belady"  # the true next use, known from a first pass over the same visits


@dataclass(frozen=True)
class Workload:
    """Questions of `num_rounds` rounds, each over all shards of the question's corpus (they are dealt out in turn). The
    first question comes at once, the others at random moments of the first sweep over all corpora. A question's next
    round comes when its last one is done and up to `longest_pause` visits have passed, in which its driver writes."""

    num_shards: int  # of each corpus
    num_rounds: int
    num_questions: int = 1
    num_corpora: int = 1
    longest_pause: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_shards, self.num_rounds, self.num_questions, self.num_corpora) < 1 or self.longest_pause < 0:
            raise InputError(f"simulation: counts must be at least 1 and the pause at least 0, {self} was asked for")

    def shards_of(self, corpus: int) -> list[Shard]:
        """The shards of one corpus, in their order."""
        return [(corpus, index) for index in range(self.num_shards)]

    def shards(self) -> list[Shard]:
        """The shards of all corpora, in the order in which they are read."""
        return [shard for corpus in range(self.num_corpora) for shard in self.shards_of(corpus)]


@dataclass(frozen=True)
class Outcome:
    """What the rounds took; the first reading is not counted."""

    num_visits: int
    num_read_again: int
    num_rounds: int  # of all questions together

    @property
    def hit_rate(self) -> float:
        """The share of visits that found their shard in the pool."""
        return 1 - self.num_read_again / self.num_visits

    @property
    def read_again_per_round(self) -> float:
        """Shards read again, over the rounds of all questions."""
        return self.num_read_again / self.num_rounds


def simulate(workload: Workload, capacity: int, order: Order, rule: Rule) -> Outcome:
    """Runs the workload over a pool of `capacity` shards; raises `InputError` for less than one."""
    if capacity < 1:
        raise InputError(f"simulation: a pool of {capacity} shards was asked for, it takes at least 1")
    sweeps: Sweeps[_Work] = Sweeps()
    for corpus in range(workload.num_corpora):
        sweeps.open(corpus, workload.shards_of(corpus), alternates=order is Order.SWEEP)
    visits = chain(workload.shards(), _visits(workload, sweeps))
    policy: EvictionPolicy[Shard]
    if rule is Rule.LRU:
        policy = LeastRecentlyUsed()
    elif rule is Rule.PREDICTED:
        policy = FurthestNextUse(sweeps.next_use)
    else:
        future = _Future(list(visits))
        visits, policy = chain(future), FurthestNextUse(future.next_use)
    hits = list(_hits(visits, capacity, policy))[len(workload.shards()) :]
    return Outcome(len(hits), hits.count(False), workload.num_rounds * workload.num_questions)


def _hits(visits: Iterator[Shard], capacity: int, policy: EvictionPolicy[Shard]) -> Iterator[bool]:
    """Whether each visited shard was in the pool; where it was not, another one makes way."""
    pool: set[Shard] = set()
    for shard in visits:
        yield shard in pool
        if shard not in pool and len(pool) == capacity:
            pool.remove(policy.order(sorted(pool))[0])
        pool.add(shard)
        policy.used(shard)


def _visits(workload: Workload, sweeps: Sweeps[_Work]) -> Iterator[Shard]:
    """Yields each shard as the sweeps come to it. `sweeps` knows then what the engine would: no round to come."""
    numbers = random.Random(workload.seed)
    num_shards = workload.num_shards * workload.num_corpora
    rounds_left = [workload.num_rounds] * workload.num_questions
    shards_left = [0] * workload.num_questions
    coming = [(numbers.randrange(num_shards) if question else 0, question) for question in range(len(rounds_left))]
    heapq.heapify(coming)
    for time in count(1):
        while coming and (coming[0][0] < time or not len(sweeps)):
            _, question = heapq.heappop(coming)
            corpus = question % workload.num_corpora
            rounds_left[question] -= 1
            shards_left[question] = workload.num_shards
            for shard in workload.shards_of(corpus):
                sweeps.add(corpus, shard, (question, shard))
        if not len(sweeps):
            return
        shard, questions = _leave_together(sweeps)
        yield shard
        for question in questions:
            shards_left[question] -= 1
            if not shards_left[question] and rounds_left[question]:
                heapq.heappush(coming, (time + numbers.randint(0, workload.longest_pause), question))


def _leave_together(sweeps: Sweeps[_Work]) -> tuple[Shard, list[int]]:
    """The next shard, and the questions whose work over it leaves."""
    question, shard = sweeps.pop()
    questions = [question]
    while (head := sweeps.head()) is not None and head[1] == shard:
        questions.append(sweeps.pop()[0])
    return shard, questions


class _Future:
    """The true future: visits that are known beforehand. To iterate over them is to make them."""

    def __init__(self, visits: Sequence[Shard]) -> None:
        self._visits = visits
        self._times: defaultdict[Shard, deque[int]] = defaultdict(deque)  # of the visits to come
        for time, shard in enumerate(visits):
            self._times[shard].append(time)

    def __iter__(self) -> Iterator[Shard]:
        for shard in self._visits:
            self._times[shard].popleft()
            yield shard

    def next_use(self, shard: Shard) -> NextUse:
        """When a shard is visited next."""
        times = self._times[shard]
        return (times[0], 0) if times else NEVER
