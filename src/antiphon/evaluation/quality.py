"""How close a candidate precision is to a baseline one: perplexities, their ratio and the share of equal top tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from antiphon.engine.errors import InputError

_NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class WindowScores:
    """One window of text under one precision: of every position with a next token, that token's log-probability and the
    likeliest token, `[tokens - 1]` each."""

    logprobs: Sequence[float]
    top_tokens: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.top_tokens) or not self.logprobs:
            raise InputError(f"quality: {len(self.logprobs)} log-probabilities, {len(self.top_tokens)} top tokens")


@dataclass(frozen=True)
class Interval:
    """A value and the 95 % confidence interval around it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Quality:
    """`perplexity_ratio` is candidate over baseline (1.01: one per cent worse); `agreement` the share, 0 to 1, of
    positions with the same top token; `top1_…` the shares at which the text's own next token is the top one."""

    num_windows: int
    num_positions: int
    baseline_perplexity: float
    candidate_perplexity: float
    perplexity_ratio: Interval
    agreement: Interval
    baseline_top1: float
    candidate_top1: float

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, ready for `json.dumps`."""
        return asdict(self)


def compare(
    baseline: Sequence[WindowScores], candidate: Sequence[WindowScores], texts: Sequence[Sequence[int]], seed: int = 0
) -> Quality:
    """Window by window over the same `texts` (token ids). Positions of one window depend on each other, so intervals
    come from resampling whole windows (percentile bootstrap)."""
    if not len(baseline) == len(candidate) == len(texts) or not texts:
        raise InputError(f"quality: {len(baseline)} and {len(candidate)} windows for {len(texts)} texts")
    sizes = np.array([len(window.logprobs) for window in baseline])
    if any(len(window.logprobs) != size for window, size in zip(candidate, sizes, strict=True)):
        raise InputError("quality: baseline and candidate have windows of different lengths")
    own = np.array([math.fsum(window.logprobs) for window in baseline])
    other = np.array([math.fsum(window.logprobs) for window in candidate])
    equal = np.array([_num_equal(a.top_tokens, b.top_tokens) for a, b in zip(baseline, candidate, strict=True)])
    picks = np.random.default_rng(seed).integers(0, len(sizes), (_NUM_RESAMPLES, len(sizes)))
    drawn = sizes[picks].sum(1)
    ratios = np.exp((own[picks].sum(1) - other[picks].sum(1)) / drawn)
    total = int(sizes.sum())
    return Quality(
        num_windows=len(sizes),
        num_positions=total,
        baseline_perplexity=math.exp(-own.sum() / total),
        candidate_perplexity=math.exp(-other.sum() / total),
        perplexity_ratio=_interval(math.exp((own.sum() - other.sum()) / total), ratios),
        agreement=_interval(float(equal.sum() / total), equal[picks].sum(1) / drawn),
        baseline_top1=_top1(baseline, texts) / total,
        candidate_top1=_top1(candidate, texts) / total,
    )


def _interval(value: float, resampled: np.ndarray[Any, np.dtype[np.float64]]) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _top1(windows: Sequence[WindowScores], texts: Sequence[Sequence[int]]) -> int:
    return sum(_num_equal(window.top_tokens, text[1:]) for window, text in zip(windows, texts, strict=True))


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(left, right, strict=True))
