"""A token comes back (step 9 of the reading path): logits of a step to one token per row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.engine.random_numbers import uniform
from antiphon.engine.sampling_params import SamplingParams
from antiphon.kernels import reference
from antiphon.kernels.ops import FindPeak

MIN_LOGPROB = -9999.0


@dataclass(frozen=True)
class SampleRow:
    """What the sampler must know of a row: its parameters, all tokens so far (for penalties, `new_token_ids` being the
    generated ones), its identity and position (for the random draw), and the grammar's allowed ids if any (a mask)."""

    params: SamplingParams
    token_ids: Sequence[int]
    new_token_ids: Sequence[int]
    identity: int
    position: int
    allowed: NDArray[np.bool_] | None


@dataclass(frozen=True)
class Sampled:
    """The token of one row, its log-probability (before temperature), and the likeliest ids with theirs if asked for.
    `error` is set, and the token -1, where the row cannot be sampled; other rows are not touched by that."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


@torch.inference_mode()
def sample(
    logits: Tensor | Sequence[Tensor], rows: Sequence[SampleRow], find_peak: FindPeak = reference.peak
) -> list[Sampled]:
    """`logits [rows, vocab]` in fp32 → one `Sampled` per row. Each row is computed from its own logits alone. Of equal
    logits the lowest id is the greedy token."""
    return [_sample_row(logits[index], row, find_peak) for index, row in enumerate(rows)]


def _sample_row(logits: Tensor, row: SampleRow, find_peak: FindPeak) -> Sampled:
    logits = _apply_penalties(logits, row)
    allowed = None if row.allowed is None else torch.from_numpy(row.allowed[: logits.shape[0]])
    largest, token_id, has_nan = find_peak(logits, allowed)
    if has_nan:
        return Sampled(-1, MIN_LOGPROB, error="the model gave NaN logits for this row")
    if not math.isfinite(largest):
        if allowed is not None and not bool(allowed.any()):
            return Sampled(-1, MIN_LOGPROB, error="the grammar allows no token here")
        return Sampled(-1, MIN_LOGPROB, error="the model gave no finite logit for this row")
    if row.params.greedy and row.params.num_logprobs is None:
        return Sampled(token_id, 0.0)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    if not row.params.greedy:
        token_id = _draw(logits, row)
    return _with_logprobs(logits, token_id, row.params.num_logprobs)


def _apply_penalties(logits: Tensor, row: SampleRow) -> Tensor:
    params = row.params
    if params.repetition_penalty == 1 and not (
        params.presence_penalty or params.frequency_penalty or params.logit_bias
    ):
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.token_ids)), dtype=torch.int64)
        chosen = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(chosen > 0, chosen / factor, chosen * factor)
    for token_id, count in Counter(row.new_token_ids).items():
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < logits.shape[0]:
            logits[token_id] += bias
    return logits


def _draw(logits: Tensor, row: SampleRow) -> int:
    """Inverse of the cumulative distribution, over the ids kept by top-k, top-p and min-p, likeliest first."""
    params = row.params
    scaled = (logits - logits.max()).double() / params.temperature
    values, order = torch.sort(scaled, descending=True, stable=True)
    if 0 < params.top_k < values.shape[0]:
        values, order = values[: params.top_k], order[: params.top_k]
    weights = torch.softmax(values, dim=0)
    keep = (weights > 0) & (weights >= params.min_p * weights[0])
    keep &= weights.cumsum(0) - weights < params.top_p
    keep[0] = True
    cumulative = torch.where(keep, weights, 0.0).cumsum(0)
    point = uniform(params.seed, row.identity, row.position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, torch.tensor(point, dtype=torch.float64), right=True))
    return int(order[min(index, int(keep.nonzero()[-1]))])


def _with_logprobs(logits: Tensor, token_id: int, num_logprobs: int | None) -> Sampled:
    if num_logprobs is None:
        return Sampled(token_id, 0.0)
    logprobs = torch.log_softmax(logits, dim=0).clamp(min=MIN_LOGPROB)
    values, order = torch.topk(logprobs, min(num_logprobs, logprobs.shape[0]))
    top = tuple((int(index), float(value)) for index, value in zip(order, values, strict=True))
    return Sampled(token_id, float(logprobs[token_id]), top)
