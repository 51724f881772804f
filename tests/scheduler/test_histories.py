"""The whole scheduler under random histories: every row ends, says what it must, and no page is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from fake_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from antiphon.engine.pages import KVCache
from antiphon.engine.prefix_store import PrefixStore
from antiphon.scheduler import verification
from antiphon.scheduler.admission import Admission

# About twenty histories a second; more of them with ANTIPHON_SEEDS, from ANTIPHON_FIRST_SEED on.
NUM_SEEDS = int(os.environ.get("ANTIPHON_SEEDS", "600"))
FIRST_SEED = int(os.environ.get("ANTIPHON_FIRST_SEED", "0"))
OPERATIONS = ("read_corpus", "query", "query", "turn", "abort", "release", "drop_owner") + ("step",) * 9 + ("move",) * 4
PARTS = 10


def live_through(seed: int) -> World:
    world = World(seed)
    choose = random.Random(seed + 1_000_000)
    try:
        world.read_corpus()
        for _ in range(60):
            getattr(world, choose.choice(OPERATIONS))()
        world.finish()
    except BaseException as error:
        error.add_note(f"seed {seed}: ANTIPHON_FIRST_SEED={seed} ANTIPHON_SEEDS=1 shows it again")
        raise
    return world


@pytest.mark.parametrize("part", range(PARTS))
def test_every_history_ends_well(part: int) -> None:
    seeds = range(FIRST_SEED + part, FIRST_SEED + NUM_SEEDS, PARTS)
    seen: dict[str, float] = {}
    for seed in seeds:
        for name, value in live_through(seed).lane.counters.as_dict().items():
            seen[name] = seen.get(name, 0) + value
    if len(seeds) >= 50:  # these histories hold what they are for
        assert all(value > 0 for value in seen.values()), seen


def test_a_seed_is_the_same_history_every_time() -> None:
    first, second = live_through(3), live_through(3)
    assert first.lane.counters == second.lane.counters
    assert [list(row.token_ids) for row in first.rows] == [list(row.token_ids) for row in second.rows]


FAULTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "a partial page is shared, not copied": (KVCache, "copy_pages", lambda cache, source, target: None),
    "a state arrives without its bits": (KVCache, "copy_in", lambda cache, pages, tensors: None),
    "what leaves is not told": (PrefixStore, "_drop", lambda store, key: store._declared.pop(key)),
    "a drafted token stays that was not sampled": (
        verification,
        "_num_equal",
        lambda left, right: min(map(len, (left, right))),
    ),
    "idle rows never make room": (Admission, "make_room", lambda admission, held: False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls: each of these must end some history badly."""
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or whatever the fault leads to
        for seed in range(200):
            world = live_through(seed)
            failed = [row.future.exception() for row in world.rows if row.future.exception() is not None]
            assert not any("the rest is pinned" in str(error) for error in failed)


class Histories(RuleBasedStateMachine):
    """The same operations in whatever order hypothesis likes: it makes a failing history short."""

    @initialize(seed=st.integers(0, 10_000))
    def begin(self, seed: int) -> None:
        """A world of its own, with a corpus to be read."""
        self.world = World(seed)
        self.world.read_corpus()

    @invariant()
    def pages_are_accounted_for(self) -> None:
        """Free and held pages are all, and every owner is on the books."""
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Whatever happened, all ends well."""
        if hasattr(self, "world"):
            self.world.finish()


def _rule(name: str) -> Callable[[Histories], None]:
    def run(self: Histories) -> None:
        getattr(self.world, name)()

    run.__name__ = name
    return rule()(run)


for _name in dict.fromkeys(OPERATIONS):
    setattr(Histories, _name, _rule(_name))


def test_ten_thousand_steps_of_any_order() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=100,
            stateful_step_count=100,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
