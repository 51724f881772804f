"""`DepthChooser`: how many drafted tokens of each row to verify in a step, from what steps cost and drafts gave so far.

A drafted token is worth the chance that it, and all before it, is what the model writes; it costs what one more token
adds to a step. Every row has its own next token for certain. What is asked for is the most expected tokens a second.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.scheduler.quoted_text import MAX_MATCH_TOKENS, MIN_MATCH_TOKENS

# Each step, what was known before counts this much: about the last fifty steps of either kind decide.
_KEPT = 0.98
# Before anything is known, a match of m tokens goes on with the chance m / (m + 1), held as firmly as this many trials.
_PRIOR_TRIALS = 2.0
# Before two sizes of step were seen, this many more tokens are taken to cost as much as the step's fixed part and its
# own tokens together, held as firmly as this variance of the sizes.
_PRIOR_FIXED_TOKENS = 8.0
_PRIOR_VARIANCE = 0.25
# A step that took longer was disturbed: it counts as this many times what was expected.
_MAX_SURPRISE = 2.0


@dataclass
class StepCost:
    """Seconds of a step as `fixed + per_token × tokens`, by least squares over its past, recent steps counting more."""

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return self._weight > 0

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if self.known:
            seconds = min(seconds, _MAX_SURPRISE * self.seconds(num_tokens))
        self._weight = _KEPT * self._weight + 1
        self._tokens = _KEPT * self._tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + num_tokens**2
        self._products = _KEPT * self._products + num_tokens * seconds

    def seconds(self, num_tokens: float) -> float:
        """Expected seconds of a step of so many tokens; something must have been measured."""
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        return max(mean_seconds + self.per_token() * (num_tokens - mean_tokens), 0.1 * mean_seconds)

    def per_token(self) -> float:
        """Expected seconds that one more token adds."""
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = max(0.0, self._squares / self._weight - mean_tokens**2)
        covariance = self._products / self._weight - mean_tokens * mean_seconds
        prior = mean_seconds / (mean_tokens + _PRIOR_FIXED_TOKENS)
        slope = (covariance + _PRIOR_VARIANCE * prior) / (variance + _PRIOR_VARIANCE)
        return min(max(slope, 0.0), mean_seconds / mean_tokens)


@dataclass
class AcceptRate:
    """The chance that the token behind a match is what the model writes, by the match's length."""

    _right: list[float] = field(default_factory=lambda: [0.0] * (MAX_MATCH_TOKENS + 1))
    _trials: list[float] = field(default_factory=lambda: [0.0] * (MAX_MATCH_TOKENS + 1))

    def rate(self, match_tokens: int) -> float:
        """Between 0 and 1."""
        length = min(match_tokens, MAX_MATCH_TOKENS)
        prior = length / (length + 1)
        return (self._right[length] + _PRIOR_TRIALS * prior) / (self._trials[length] + _PRIOR_TRIALS)

    def verified(self, match_tokens: int, num_drafted: int, num_right: int) -> None:
        """Of so many drafted tokens behind a match, the first `num_right` were right; what follows a wrong one says
        nothing."""
        for index in range(min(num_right + 1, num_drafted)):
            length = min(match_tokens + index, MAX_MATCH_TOKENS)
            self._trials[length] += 1
            self._right[length] += index < num_right

    def forget(self) -> None:
        """A step has passed: what was seen counts less, so that what stopped paying is tried again now and then."""
        for length in range(MIN_MATCH_TOKENS, MAX_MATCH_TOKENS + 1):
            self._trials[length] *= _KEPT
            self._right[length] *= _KEPT


@dataclass
class DepthChooser:
    """Chooses depths from one lane's `cost` and `accepts`."""

    cost: StepCost = field(default_factory=StepCost)
    accepts: AcceptRate = field(default_factory=AcceptRate)

    def choose(self, match_tokens: Sequence[int], limits: Sequence[int], num_rows: int, num_tokens: int) -> list[int]:
        """A depth for each draft: `match_tokens[i]` matched, at most `limits[i]` are there. The step has `num_rows`
        rows and `num_tokens` tokens without them.

        Tokens are added likeliest first for as long as each adds more tokens a second than the step has with those
        before it: chances only fall along a draft, so no other choice of as many tokens has more to expect.
        """
        depths = [0] * len(limits)
        if not self.cost.known:
            return depths
        per_token = self.cost.per_token()
        seconds, expected = self.cost.seconds(num_tokens), float(num_rows)
        chances = [
            (-self.accepts.rate(match), index)
            for index, (match, limit) in enumerate(zip(match_tokens, limits, strict=True))
            if limit > 0
        ]
        heapq.heapify(chances)
        while chances:
            negative, index = heapq.heappop(chances)
            if -negative * seconds <= per_token * expected:
                break
            expected -= negative
            seconds += per_token
            depths[index] += 1
            if depths[index] < limits[index]:
                rate = self.accepts.rate(match_tokens[index] + depths[index])
                heapq.heappush(chances, (negative * rate, index))
        return depths
