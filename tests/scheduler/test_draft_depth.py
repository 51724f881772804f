"""The depth is the one with the most expected tokens a second, and 0 where no draft pays."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.scheduler.draft_depth import AcceptRate, DepthChooser, StepCost

MEMORY_BOUND = (0.030, 0.002)
COMPUTE_BOUND = (0.001, 0.010)


def chooser(cost: tuple[float, float], right: float = 0.9, num_steps: int = 300) -> DepthChooser:
    """After many steps of one to eight tokens that took `cost[0] + cost[1] × tokens` seconds, and drafts behind
    matches of every length of which every token came true with the same chance."""
    made = DepthChooser()
    for step in range(num_steps):
        num_tokens = 1 + step % 8
        made.cost.measured(num_tokens, cost[0] + cost[1] * num_tokens)
        made.accepts.forget()
        for length in range(2, 9):
            made.accepts.verified(length, 1, 1 if step % 10 < round(10 * right) else 0)
    return made


def expected_rate(made: DepthChooser, matches: list[int], depths: tuple[int, ...], num_tokens: int) -> float:
    expected = float(len(matches))
    for match, depth in zip(matches, depths, strict=True):
        chance = 1.0
        for index in range(depth):
            chance *= made.accepts.rate(match + index)
            expected += chance
    return expected / (made.cost.seconds(num_tokens) + made.cost.per_token() * sum(depths))


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert DepthChooser().choose([5, 3], [9, 9], 2, 2) == [0, 0]


def test_seconds_of_a_step_are_learnt() -> None:
    made = chooser((0.030, 0.002))
    assert made.cost.per_token() == pytest.approx(0.002, rel=0.1)
    assert made.cost.seconds(5) == pytest.approx(0.040, rel=0.02)
    assert made.cost.seconds(20) == pytest.approx(0.070, rel=0.1)


def test_a_disturbed_step_is_not_taken_for_the_cost_of_its_tokens() -> None:
    made = chooser(MEMORY_BOUND)
    made.cost.measured(8, 30.0)
    assert made.cost.seconds(8) < 2 * (0.030 + 8 * 0.002)


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_a_lane_that_saw_steps_of_one_size_expects_a_fixed_part_and_one_of_tokens(num_tokens: int) -> None:
    cost = StepCost()
    for _ in range(100):
        cost.measured(num_tokens, 0.04)
    assert cost.seconds(num_tokens) == pytest.approx(0.04)
    assert 0 < cost.per_token() < 0.04 / num_tokens


def test_chances_are_learnt_by_the_length_of_the_match_and_only_as_far_as_the_first_wrong_token() -> None:
    accepts = AcceptRate()
    before = [accepts.rate(length) for length in range(2, 7)]
    accepts.verified(2, 4, 2)
    after = [accepts.rate(length) for length in range(2, 7)]
    assert [now > then for now, then in zip(after, before, strict=True)] == [True, True, False, False, False]
    assert after[2] < before[2] and after[3:] == before[3:]


def test_one_row_drafts_deep_where_steps_wait_for_memory_and_not_at_all_where_tokens_cost_all() -> None:
    assert chooser(MEMORY_BOUND).choose([8], [16], 1, 1)[0] >= 8
    assert chooser(COMPUTE_BOUND, right=0.7).choose([8], [16], 1, 1) == [0]


def test_drafts_that_do_not_come_true_are_given_up_and_tried_again_much_later() -> None:
    made = chooser((0.030, 0.010), right=0.1)
    assert made.choose([2, 8], [16, 16], 2, 2) == [0, 0]
    for _ in range(400):
        made.cost.measured(2, 0.050)
        made.accepts.forget()
    assert made.choose([2, 8], [16, 16], 2, 2)[1] > 0


def test_more_live_rows_draft_less() -> None:
    made = chooser((0.030, 0.006), right=0.8)
    depths = [made.choose([4] * rows, [16] * rows, rows, rows)[0] for rows in (1, 2, 4, 8, 64)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 0 and depths[-1] == 0


@given(
    st.lists(st.tuples(st.integers(2, 8), st.integers(0, 4)), min_size=1, max_size=4),
    st.sampled_from([MEMORY_BOUND, COMPUTE_BOUND, (0.030, 0.006), (0.030, 0.015)]),
    st.sampled_from([0.2, 0.5, 0.8, 1.0]),
)
def test_no_other_depths_have_more_tokens_a_second_to_expect(
    drafts: list[tuple[int, int]], cost: tuple[float, float], right: float
) -> None:
    made = chooser(cost, right, num_steps=60)
    matches, limits = [match for match, _ in drafts], [limit for _, limit in drafts]
    chosen = made.choose(matches, limits, len(drafts), len(drafts))
    assert all(0 <= depth <= limit for depth, limit in zip(chosen, limits, strict=True))
    rates = {
        depths: expected_rate(made, matches, depths, len(drafts))
        for depths in itertools.product(*(range(limit + 1) for limit in limits))
    }
    assert rates[tuple(chosen)] == pytest.approx(max(rates.values()), rel=1e-9)
