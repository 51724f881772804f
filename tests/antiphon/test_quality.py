"""What is said of a candidate precision: by hand on small cases, and with intervals that hold what they should."""

from __future__ import annotations

import math

import numpy as np
import pytest

from antiphon.engine.errors import InputError
from antiphon.evaluation.quality import WindowScores, compare

TEXTS = [[5, 1, 2], [5, 3, 4]]
BASELINE = [WindowScores([-1.0, -2.0], [1, 9]), WindowScores([-3.0, -2.0], [3, 4])]
CANDIDATE = [WindowScores([-1.5, -2.0], [1, 8]), WindowScores([-3.0, -2.5], [3, 4])]


def test_perplexities_ratio_and_agreement_are_those_of_all_positions() -> None:
    quality = compare(BASELINE, CANDIDATE, TEXTS)
    assert (quality.num_windows, quality.num_positions) == (2, 4)
    assert quality.baseline_perplexity == pytest.approx(math.exp(2.0))
    assert quality.candidate_perplexity == pytest.approx(math.exp(2.25))
    assert quality.perplexity_ratio.value == pytest.approx(math.exp(0.25))
    assert quality.agreement.value == 0.75
    assert (quality.baseline_top1, quality.candidate_top1) == (0.75, 0.75)


def test_a_precision_against_itself_is_equal_and_certain() -> None:
    quality = compare(BASELINE, BASELINE, TEXTS)
    for interval, expected in ((quality.perplexity_ratio, 1.0), (quality.agreement, 1.0)):
        assert (interval.low, interval.value, interval.high) == (expected, expected, expected)


def test_windows_that_differ_as_wholes_widen_the_interval() -> None:
    """Half the windows agree everywhere, half nowhere: as uncertain as a coin thrown once a window, not a position."""
    same = [WindowScores([-1.0] * 50, [1] * 50)] * 40
    other = [WindowScores([-1.0] * 50, [index % 2] * 50) for index in range(40)]
    agreement = compare(same, other, [[0] * 51] * 40).agreement
    half_width = 1.96 * 0.5 / math.sqrt(40)
    assert agreement.value == 0.5
    assert (agreement.low, agreement.high) == pytest.approx((0.5 - half_width, 0.5 + half_width), abs=0.02)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for seed in range(60):
        draws = generator.random((30, 20)) < 0.9
        same = [WindowScores([-1.0] * 20, [1] * 20)] * 30
        other = [WindowScores([-1.0] * 20, row.astype(int).tolist()) for row in draws]
        agreement = compare(same, other, [[0] * 21] * 30, seed).agreement
        hits += agreement.low <= 0.9 <= agreement.high
    assert hits >= 51


def test_windows_that_do_not_match_are_refused() -> None:
    with pytest.raises(InputError, match="2 and 1 windows for 2 texts"):
        compare(BASELINE, CANDIDATE[:1], TEXTS)
    with pytest.raises(InputError, match="different lengths"):
        compare(BASELINE, [CANDIDATE[0], WindowScores([-1.0], [1])], TEXTS)
    with pytest.raises(InputError, match="1 log-probabilities, 2 top tokens"):
        WindowScores([-1.0], [1, 2])
