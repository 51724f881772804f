from __future__ import annotations

from itertools import product

import pytest

from antiphon.engine.errors import InputError
from antiphon.scheduler.simulation import Order, Outcome, Rule, Workload, simulate

NUM_SHARDS = 10
ROUNDS = range(2, 13)


def one_question(capacity: int, num_rounds: int, order: Order, rule: Rule) -> Outcome:
    return simulate(Workload(NUM_SHARDS, num_rounds), capacity, order, rule)


@pytest.mark.parametrize("num_rounds", ROUNDS)
def test_on_one_corpus_the_sweep_equals_belady_and_hits_capacity_over_shards(num_rounds: int) -> None:
    for capacity in range(1, NUM_SHARDS + 1):
        sweep = one_question(capacity, num_rounds, Order.SWEEP, Rule.PREDICTED)
        assert sweep == one_question(capacity, num_rounds, Order.SWEEP, Rule.BELADY)
        assert sweep.num_visits == num_rounds * NUM_SHARDS
        assert sweep.num_read_again == num_rounds * (NUM_SHARDS - capacity)


@pytest.mark.parametrize("num_rounds", ROUNDS)
def test_a_scan_under_least_recently_used_hits_nothing_unless_all_fits(num_rounds: int) -> None:
    for capacity in range(1, NUM_SHARDS):
        assert one_question(capacity, num_rounds, Order.SCAN, Rule.LRU).hit_rate == 0
    assert one_question(NUM_SHARDS, num_rounds, Order.SCAN, Rule.LRU).hit_rate == 1


@pytest.mark.parametrize("num_rounds", ROUNDS)
def test_order_and_rule_gain_each_alone_and_both_together_most(num_rounds: int) -> None:
    """Least recently used in the order of sweeps is Belady's choice there; the true next use in the order of a scan
    hits nearly as much: (capacity - 1) / (shards - 1) in the long run."""
    for capacity in range(1, NUM_SHARDS + 1):
        sweep = one_question(capacity, num_rounds, Order.SWEEP, Rule.PREDICTED)
        assert one_question(capacity, num_rounds, Order.SWEEP, Rule.LRU) == sweep
        scan = one_question(capacity, num_rounds, Order.SCAN, Rule.BELADY)
        assert scan == one_question(capacity, num_rounds, Order.SCAN, Rule.PREDICTED)
        assert scan.num_read_again >= sweep.num_read_again
        assert abs(scan.hit_rate - (capacity - 1) / (NUM_SHARDS - 1)) <= 1 / num_rounds


MANY = [
    Workload(20, 4, num_questions, num_corpora, pause, seed)
    for num_questions, num_corpora, pause, seed in product((2, 8, 32), (1, 3), (0, 20), (0, 1))
]


@pytest.mark.parametrize("workload", MANY, ids=repr)
def test_nothing_beats_belady_on_the_same_visits(workload: Workload) -> None:
    for order, share in product(Order, (0.1, 0.5, 0.9)):
        capacity = int(share * len(workload.shards()))
        outcomes = {rule: simulate(workload, capacity, order, rule) for rule in Rule}
        assert len({outcome.num_visits for outcome in outcomes.values()}) == 1, "a rule must not change the order"
        assert outcomes[Rule.BELADY].num_read_again == min(outcome.num_read_again for outcome in outcomes.values())
        assert outcomes[Rule.PREDICTED].num_read_again <= outcomes[Rule.LRU].num_read_again + workload.num_shards


@pytest.mark.parametrize("num_questions", [2, 8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_where_drivers_do_not_pause_many_questions_cost_the_sweep_nothing(num_questions: int, seed: int) -> None:
    workload = Workload(20, 6, num_questions, seed=seed)
    for capacity in range(1, 21):
        predicted, belady = (
            simulate(workload, capacity, Order.SWEEP, rule).num_read_again for rule in (Rule.PREDICTED, Rule.BELADY)
        )
        assert predicted == belady


def test_questions_share_visits_and_pauses_part_them() -> None:
    alone, together, apart = (Workload(20, 6, *parts) for parts in ((1,), (8,), (8, 1, 20)))
    visits = [simulate(workload, 10, Order.SWEEP, Rule.LRU).num_visits for workload in (alone, together, apart)]
    assert visits[0] == 120
    assert visits[0] < visits[1] < visits[2] < 8 * visits[0]


def test_over_several_corpora_least_recently_used_hits_little_in_either_order() -> None:
    workload = Workload(20, 6, 8, 4)
    for order in Order:
        hits = {rule: simulate(workload, 40, order, rule).hit_rate for rule in Rule}
        assert hits[Rule.LRU] < 0.25
        assert hits[Rule.PREDICTED] > hits[Rule.BELADY] - 0.05 > 0.4


def test_by_hand() -> None:
    """Reading 0 1 2 into two places leaves 1 and 2. Sweeps: 2 1 0 | 0 1 2, one miss each. A scan: 0 1 2 | 0 1 2."""
    assert simulate(Workload(3, 2), 2, Order.SWEEP, Rule.LRU) == Outcome(6, 2, 2)
    assert simulate(Workload(3, 2), 2, Order.SCAN, Rule.LRU) == Outcome(6, 6, 2)
    # Belady has 0 and 2 after reading: hits 0, takes 1 for 0, hits 2, takes 0 for 2, hits 1, takes 2.
    assert simulate(Workload(3, 2), 2, Order.SCAN, Rule.BELADY) == Outcome(6, 3, 2)


def test_an_outcome_s_rates() -> None:
    outcome = Outcome(num_visits=8, num_read_again=2, num_rounds=4)
    assert (outcome.hit_rate, outcome.read_again_per_round) == (0.75, 0.5)


def test_runs_repeat() -> None:
    first, again, other = (
        simulate(Workload(20, 4, 8, 2, 20, seed), 10, Order.SWEEP, Rule.PREDICTED) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        simulate(Workload(4, 2), 0, Order.SWEEP, Rule.LRU)
    for parts in ((0, 1), (1, 0), (1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1, -1)):
        with pytest.raises(InputError, match="at least 1"):
            Workload(*parts)
