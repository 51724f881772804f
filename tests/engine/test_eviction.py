from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.eviction import NEVER, EvictionPolicy, FurthestNextUse, LeastRecentlyUsed, NextUse

VISITS = st.lists(st.integers(0, 4), min_size=1, max_size=14)


def misses(visits: Sequence[int], capacity: int, policy: EvictionPolicy[int], now: list[int]) -> int:
    """How many visits find their key absent from a pool of `capacity`; `now[0]` is the time for whoever asks."""
    pool: set[int] = set()
    num_misses = 0
    for now[0], key in enumerate(visits):
        if key not in pool:
            num_misses += 1
            if len(pool) == capacity:
                pool.remove(policy.order(sorted(pool))[0])
            pool.add(key)
        policy.used(key)
    return num_misses


def belady_misses(visits: Sequence[int], capacity: int) -> int:
    now = [0]

    def next_use(key: int) -> NextUse:
        return next(((float(time), 0.0) for time in range(now[0] + 1, len(visits)) if visits[time] == key), NEVER)

    return misses(visits, capacity, FurthestNextUse(next_use), now)


def fewest_misses(visits: Sequence[int], capacity: int) -> int:
    """Of all ways to choose what leaves, by trying them."""

    @cache
    def from_here(time: int, pool: frozenset[int]) -> int:
        if time == len(visits):
            return 0
        key = visits[time]
        if key in pool:
            return from_here(time + 1, pool)
        if len(pool) < capacity:
            return 1 + from_here(time + 1, pool | {key})
        return 1 + min(from_here(time + 1, pool - {gone} | {key}) for gone in pool)

    return from_here(0, frozenset())


def test_what_was_used_longest_ago_leaves_first() -> None:
    policy: LeastRecentlyUsed[str] = LeastRecentlyUsed()
    for key in "abca":
        policy.used(key)
    assert policy.order("abc") == ["b", "c", "a"]
    assert policy.order("anb") == ["n", "b", "a"], "one that was never used is the oldest"


def test_a_forgotten_key_counts_as_never_used() -> None:
    policy: LeastRecentlyUsed[str] = LeastRecentlyUsed()
    for key in "ab":
        policy.used(key)
    policy.forget("b")
    policy.forget("unknown")
    assert policy.order("ab") == ["b", "a"]


def test_what_is_needed_last_leaves_first_and_among_equals_what_was_used_longest_ago() -> None:
    uses: dict[str, NextUse] = {"soon": (1, 0), "late": (1, 7), "later": (2, 3)}
    policy = FurthestNextUse[str](lambda key: uses.get(key, NEVER))
    for key in ("unknown", "later", "soon", "unknown too", "late"):
        policy.used(key)
    assert policy.order(["soon", "unknown too", "later", "unknown", "late"]) == [
        "unknown",
        "unknown too",
        "later",
        "late",
        "soon",
    ]


@given(st.lists(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_an_order_names_every_candidate_once(used: list[int], candidates: set[int]) -> None:
    for policy in (LeastRecentlyUsed[int](), FurthestNextUse[int](lambda key: (float(key % 3), 0.0))):
        for key in used:
            policy.used(key)
        assert sorted(policy.order(candidates)) == sorted(candidates)


@given(VISITS)
def test_least_recently_used_is_the_order_of_last_uses(visits: list[int]) -> None:
    policy: LeastRecentlyUsed[int] = LeastRecentlyUsed()
    for key in visits:
        policy.used(key)
    assert policy.order(set(visits)) == list(dict.fromkeys(reversed(visits)))[::-1]


@settings(deadline=None)
@given(VISITS, st.integers(1, 4))
def test_with_the_true_future_no_choice_misses_less(visits: list[int], capacity: int) -> None:
    assert belady_misses(visits, capacity) == fewest_misses(visits, capacity)


def test_least_recently_used_misses_more_than_the_fewest() -> None:
    """The control: that the fewest are few is not a matter of course."""
    visits = [0, 1, 2] * 4
    assert misses(visits, 2, LeastRecentlyUsed(), [0]) == 12
    assert belady_misses(visits, 2) == fewest_misses(visits, 2) == 7
