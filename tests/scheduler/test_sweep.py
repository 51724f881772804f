from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.eviction import NEVER
from antiphon.scheduler.sweep import Sweep, Sweeps

Work = tuple[int, int]  # place, number
CORPORA = {"a": ["a0", "a1", "a2", "both"], "b": ["both", "b1"], "c": ["c0"]}


def drained(sweeps: Sweep[Work] | Sweeps[Work]) -> Iterator[Work]:
    """What leaves if nothing more comes; `sweeps` stays as it is."""
    sweeps = copy.deepcopy(sweeps)
    while len(sweeps):
        yield sweeps.pop()


def round_over(sweep: Sweep[Work], num_shards: int, number: int = 0) -> None:
    for place in range(num_shards):
        sweep.add(place, (place, number))


def places(sweep: Sweep[Work]) -> list[int]:
    return [place for place, _ in drained(sweep)]


class Passed:
    """Counts the places that a sweep passes, seen from outside: by what leaves, and where it says that it turned."""

    def __init__(self, sweep: Sweep[Work], num_shards: int, *, alternates: bool) -> None:
        self.num_places = 0
        self.stands = num_shards - 1 if alternates else 0
        self._sweep, self._num_shards, self._alternates = sweep, num_shards, alternates
        self._ends_at = 0 if alternates else num_shards

    def turn(self) -> None:
        """The sweep goes to its end, and stands there for the next one."""
        self.num_places += abs(self._ends_at - self.stands)
        if self._alternates:
            self.stands, self._ends_at = self._ends_at, self._num_shards - 1 - self._ends_at
        else:
            self.stands = 0

    def pop(self) -> tuple[Work, int]:
        """What leaves, and how many places had been passed then."""
        work = self._sweep.pop()
        self.num_places += abs(work[0] - self.stands)
        self.stands = work[0]
        passed = self.num_places
        if not self._sweep.begun:
            self.turn()
        return work, passed

    def to_return(self) -> int:
        """How many places lie before this one comes again."""
        return 2 * abs(self._ends_at - self.stands) if self._alternates else self._num_shards


def test_rounds_start_where_the_last_one_ended() -> None:
    sweep: Sweep[Work] = Sweep(range(4))
    for expected in ([3, 2, 1, 0], [0, 1, 2, 3], [3, 2, 1, 0]):
        round_over(sweep, 4)
        assert [sweep.pop()[0] for _ in range(4)] == expected


def test_a_scan_starts_every_round_at_the_first_shard() -> None:
    sweep: Sweep[Work] = Sweep(range(4), alternates=False)
    for _ in range(3):
        round_over(sweep, 4)
        assert [sweep.pop()[0] for _ in range(4)] == [0, 1, 2, 3]


def test_a_query_that_comes_during_a_sweep_joins_it_and_is_completed_on_the_return() -> None:
    sweep: Sweep[Work] = Sweep(range(4))
    round_over(sweep, 4)
    assert [sweep.pop() for _ in range(2)] == [(3, 0), (2, 0)]
    round_over(sweep, 4, number=1)
    assert list(drained(sweep)) == [(1, 0), (1, 1), (0, 0), (0, 1), (2, 1), (3, 1)]


def test_what_comes_for_a_shard_while_the_sweep_is_there_waits_for_the_return() -> None:
    sweep: Sweep[Work] = Sweep(range(2))
    for number in range(2):
        sweep.add(1, (1, number))
    sweep.add(0, (0, 0))
    assert sweep.pop() == (1, 0)
    sweep.add(1, (1, 2))
    assert list(drained(sweep)) == [(1, 1), (0, 0), (1, 2)]


def test_removed_work_does_not_let_late_work_leave_early() -> None:
    sweep: Sweep[Work] = Sweep(range(2))
    for number in range(2):
        sweep.add(1, (1, number))
    sweep.add(0, (0, 0))
    sweep.pop()
    sweep.add(1, (1, 2))
    assert sweep.remove((1, 1)) and not sweep.remove((1, 1))
    assert list(drained(sweep)) == [(0, 0), (1, 2)]


def test_unknown_shards_and_empty_sweeps() -> None:
    sweep: Sweep[Work] = Sweep(range(3))
    assert sweep.next_use("unknown") == NEVER[0] and not sweep.waits("unknown")
    with pytest.raises(IndexError, match="nothing waits"):
        sweep.pop()
    with pytest.raises(KeyError):
        sweep.add("unknown", (9, 9))
    assert list(Sweep([])) == []


@pytest.mark.parametrize("alternates", [True, False])
def test_between_rounds_the_next_use_is_that_of_a_round_over_all_shards(alternates: bool) -> None:
    sweep: Sweep[Work] = Sweep(range(5), alternates=alternates)
    for _ in range(3):
        foreseen = [sweep.next_use(place) for place in range(5)]
        round_over(sweep, 5)
        assert sorted(range(5), key=foreseen.__getitem__) == places(sweep)
        assert [places(sweep).index(place) for place in range(5)] == foreseen
        while len(sweep):
            sweep.pop()


@settings(deadline=None)
@given(st.data(), st.integers(1, 7), st.booleans())
def test_work_leaves_once_in_order_and_exactly_when_foreseen(data: st.DataObject, n: int, alternates: bool) -> None:
    """Whatever comes and leaves meanwhile. The last action of each run is that everything leaves."""
    sweep: Sweep[Work] = Sweep(range(n), alternates=alternates)
    passed = Passed(sweep, n, alternates=alternates)
    due: dict[Work, int] = {}
    left: list[Work] = []
    actions = data.draw(st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "pop", "remove"]), st.integers(0, 6))))
    for number, (action, choice) in enumerate([*actions, *[("pop", 0)] * len(actions)]):
        if action == "add":
            place = choice % n
            leaves_now = sweep.begun and place == passed.stands and sweep.waits(place) and sweep.next_use(place) == 0
            sweep.add(place, (place, number))
            foreseen = passed.to_return() if leaves_now else sweep.next_use(place)
            assert foreseen <= (2 * (n - 1) if alternates else n)
            due[place, number] = passed.num_places + int(foreseen)
        elif action == "remove" and due:
            work = sorted(due)[choice % len(due)]
            begun = sweep.begun
            assert sweep.remove(work)
            del due[work]
            if begun and not sweep.begun:
                passed.turn()
        elif action == "pop" and due:
            work, num_places = passed.pop()
            assert num_places == due.pop(work)
            left.append(work)
        check(sweep, due, n)
    assert not due and not len(sweep)
    assert len(set(left)) == len(left)
    for place in range(n):
        numbers = [number for where, number in left if where == place]
        assert numbers == sorted(numbers)


def check(sweep: Sweep[Work], due: dict[Work, int], n: int) -> None:
    """What holds at every moment."""
    order = list(drained(sweep))
    assert list(sweep) == order and len(sweep) == len(order) == len(due)
    assert [sweep.waits(place) for place in range(n)] == [any(work[0] == place for work in due) for place in range(n)]
    first_uses = list(dict.fromkeys(place for place, _ in order))
    assert sorted(first_uses, key=sweep.next_use) == first_uses
    if order:
        assert sweep.next_use(order[0][0]) == min(sweep.next_use(place) for place in range(n))


class Nearest(Sweep[Work]):
    """Serves the nearest shard with work, as no sweep does."""

    def pop(self) -> Work:
        work = min(self, key=lambda work: (abs(work[0] - self._next), work))
        self.remove(work)
        self._next = work[0]
        return work


@pytest.mark.parametrize(("kind", "starves"), [(Sweep, False), (Nearest, True)])
@pytest.mark.parametrize("start", [0, 3])
def test_nothing_starves_while_other_work_comes_all_the_time(
    kind: type[Sweep[Work]], starves: bool, start: int
) -> None:
    """With work for the present place and its neighbours after every step; the nearest first is the control."""
    n = 8
    sweep = kind(range(n))
    sweep.add(7, (7, 0))
    sweep.add(start, (start, -1))
    num_places, last = 0, 7
    for number in range(1, 200):
        place, which = sweep.pop()
        num_places, last = num_places + abs(place - last), place
        if which == -1:
            break
        for neighbour in {max(0, place - 1), place, min(n - 1, place + 1)}:
            sweep.add(neighbour, (neighbour, number))
    assert (which != -1) == starves
    assert starves or num_places <= 2 * (n - 1)


def several() -> Sweeps[Work]:
    sweeps: Sweeps[Work] = Sweeps()
    for corpus, keys in CORPORA.items():
        sweeps.open(corpus, keys)
    return sweeps


def ask(sweeps: Sweeps[Work], corpus: str, number: int) -> None:
    for place, key in enumerate(CORPORA[corpus]):
        sweeps.add(corpus, key, (place, number))


def test_a_corpus_that_is_asked_again_at_once_does_not_keep_the_turn() -> None:
    sweeps = several()
    ask(sweeps, "a", 0)
    ask(sweeps, "b", 1)
    assert [sweeps.pop()[1] for _ in range(4)] == [0] * 4
    ask(sweeps, "a", 2)
    assert [number for _, number in drained(sweeps)] == [1, 1, 2, 2, 2, 2]


def test_work_that_comes_during_its_corpus_s_turn_waits_for_the_others() -> None:
    sweeps = several()
    ask(sweeps, "a", 0)
    assert [sweeps.pop() for _ in range(2)] == [(3, 0), (2, 0)]
    ask(sweeps, "c", 1)
    ask(sweeps, "a", 2)
    expected = [(1, 0), (1, 2), (0, 0), (0, 2), (0, 1), (2, 2), (3, 2)]
    assert list(sweeps) == list(drained(sweeps)) == expected


def test_a_removal_that_ends_a_sweep_ends_the_turn() -> None:
    sweeps = several()
    sweeps.add("a", "a2", (2, 0))
    sweeps.add("a", "a1", (1, 0))
    assert sweeps.pop() == (2, 0)
    sweeps.add("a", "both", (3, 0))
    ask(sweeps, "c", 1)
    assert sweeps.remove((1, 0)) and not sweeps.remove((1, 0))
    assert list(drained(sweeps)) == [(0, 1), (3, 0)]


def test_closed_corpora_are_forgotten() -> None:
    sweeps = several()
    ask(sweeps, "a", 0)
    ask(sweeps, "b", 1)
    sweeps.close("a")
    sweeps.close("a")
    assert sweeps.next_use("a1") == NEVER and not sweeps.waits("a1")
    assert sweeps.waits("both") and [number for _, number in drained(sweeps)] == [1, 1]
    sweeps.open("b", CORPORA["b"])
    assert sweeps.head() is None and len(sweeps) == 0 and sweeps.next_use("both") < NEVER
    with pytest.raises(IndexError, match="nothing waits"):
        sweeps.pop()


def test_shards_of_corpora_without_work_are_needed_last_and_the_longest_idle_ones_latest() -> None:
    sweeps = several()
    for corpus in ("b", "c"):
        ask(sweeps, corpus, 0)
    while len(sweeps):
        sweeps.pop()
    ask(sweeps, "a", 0)
    sweeps.pop()
    assert max(map(sweeps.next_use, CORPORA["a"])) < sweeps.next_use("c0") < sweeps.next_use("b1") < NEVER


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "pop", "remove"]), st.integers(0, 6))))
def test_corpora_take_turns_and_work_waits_for_one_sweep_of_every_other(actions: list[tuple[str, int]]) -> None:
    """While work waits, no shard of another corpus is visited twice, and none of its own more than twice."""
    sweeps = several()
    shards = [(corpus, place) for corpus, keys in CORPORA.items() for place in range(len(keys))]
    corpus_of: dict[Work, str] = {}
    seen: dict[Work, Counter[tuple[str, int]]] = {}  # visits since the work came
    visited = ("", 0)
    for number, (action, choice) in enumerate([*actions, *[("pop", 0)] * len(actions)]):
        if action == "add":
            corpus, place = shards[choice]
            sweeps.add(corpus, CORPORA[corpus][place], (place, number))
            corpus_of[place, number], seen[place, number] = corpus, Counter()
        elif action == "remove" and seen:
            work = sorted(seen)[choice % len(seen)]
            assert sweeps.remove(work)
            del seen[work]
        elif action == "pop" and seen:
            head = sweeps.head()
            work = sweeps.pop()
            assert head == work
            visit = (corpus_of[work], work[0])
            for other, counts in seen.items():
                counts[visit] += 1 if visit != visited or not counts[visit] else 0
                assert counts[visit] <= (2 if corpus_of[other] == visit[0] else 1)
            del seen[work]
            visited = visit
        check_several(sweeps, {work: corpus_of[work] for work in seen})
    assert not seen and not len(sweeps)


def check_several(sweeps: Sweeps[Work], waiting: dict[Work, str]) -> None:
    """What holds at every moment."""
    order = list(drained(sweeps))
    assert list(sweeps) == order and len(sweeps) == len(order)
    assert set(order) == set(waiting)
    first_uses = list(dict.fromkeys(CORPORA[waiting[work]][work[0]] for work in order))
    assert sorted(first_uses, key=sweeps.next_use) == first_uses
    keys = {key for corpus in CORPORA.values() for key in corpus}
    assert {key for key in keys if sweeps.waits(key)} == set(first_uses)
    if order:
        assert sweeps.next_use(first_uses[0]) == min(map(sweeps.next_use, keys))
