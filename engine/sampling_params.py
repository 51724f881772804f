"""`SamplingParams`: how one row turns logits into tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from antiphon.engine.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """Temperature 0, top_p 0 and top_k 1 are greedy; top_k 0 or -1 is off. Lengths are tokens."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 0, "max_new_tokens must not be negative"),
            (0 <= self.temperature < math.inf, "temperature must be finite and not negative"),
            (self.top_k >= -1, "top_k must be -1 or more"),
            (0 <= self.top_p <= 1, "top_p must lie between 0 and 1"),
            (0 <= self.min_p <= 1, "min_p must lie between 0 and 1"),
            (0 < self.repetition_penalty < math.inf, "repetition_penalty must be finite and positive"),
            (math.isfinite(self.presence_penalty + self.frequency_penalty), "penalties must be finite"),
            (not any(map(math.isnan, self.logit_bias.values())), "logit_bias must be numbers"),
            (self.num_logprobs is None or 0 <= self.num_logprobs <= 20, "num_logprobs must lie between 0 and 20"),
        )
        for holds, message in checks:
            if not holds:
                raise InputError(f"sampling: {message} ({self})")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1
