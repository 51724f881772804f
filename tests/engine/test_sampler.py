"""Each row's token depends on its own logits, parameters, identity and position alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.engine.errors import InputError
from antiphon.engine.random_numbers import row_identity, uniform
from antiphon.engine.sampler import MIN_LOGPROB, Sampled, SampleRow, sample
from antiphon.engine.sampling_params import SamplingParams

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5, -math.inf])
SIZE = len(LOGITS)


def row(position: int = 0, *, identity: int = 7, **parts: Any) -> SampleRow:
    allowed = parts.pop("allowed", None)
    token_ids, new_ids = parts.pop("token_ids", ()), parts.pop("new_token_ids", ())
    return SampleRow(SamplingParams(**parts), token_ids, new_ids, identity, position, allowed)


def one(request: SampleRow, logits: torch.Tensor = LOGITS) -> Sampled:
    return sample(logits[None], [request])[0]


def draws(count: int = 600, **params: Any) -> Counter[int]:
    requests = [row(position, **{"temperature": 1.0, **params}) for position in range(count)]
    return Counter(sampled.token_id for sampled in sample(LOGITS.expand(count, SIZE), requests))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "top_p": 0.3, "top_k": 5, "min_p": 0.5},
        {"temperature": 0, "top_k": -1},
        {"temperature": 5, "top_p": 0},
        {"temperature": 5, "top_k": 1},
    ],
)
def test_temperature_0_top_p_0_and_top_k_1_are_greedy_whatever_else_is_asked(params: dict[str, Any]) -> None:
    assert {one(row(position, **params)).token_id for position in range(50)} == {1}


def expected_shares(kept: list[int], temperature: float = 1.0) -> dict[int, float]:
    weights = {token_id: math.exp(float(LOGITS[token_id]) / temperature) for token_id in kept}
    return {token_id: weight / sum(weights.values()) for token_id, weight in weights.items()}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_k": SIZE}, [0, 1, 2, 3, 4]),
        ({"top_k": SIZE + 100}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.7}, [1, 2]),
        ({"top_p": 0.1}, [1]),
        ({"min_p": 0.2}, [1, 2, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.7}, [1, 2]),
        ({"temperature": 3.0, "top_k": 4}, [0, 1, 2, 4]),
    ],
)
def test_draws_follow_the_distribution_over_the_ids_that_are_kept(params: dict[str, Any], kept: list[int]) -> None:
    """600 draws; a share may be off by 5 of its standard deviations. Ids with probability 0 are never drawn."""
    counts = draws(**params)
    shares = expected_shares(kept, params.get("temperature", 1.0))
    assert set(counts) <= set(kept)
    for token_id, share in shares.items():
        assert abs(counts[token_id] / 600 - share) <= 5 * math.sqrt(share * (1 - share) / 600)


def test_the_same_seed_identity_and_position_draw_the_same_alone_and_in_a_crowd() -> None:
    """vllm#51226: a row with a seed must not depend on rows without one."""
    requests = [row(index, identity=index, temperature=1.5, seed=index % 3) for index in range(40)]
    logits = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(0))
    together = [sampled.token_id for sampled in sample(logits, requests)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [requests[index] for index in order])
    assert [together[index] for index in order] == [sampled.token_id for sampled in shuffled]
    assert together == [one(request, logits[index]).token_id for index, request in enumerate(requests)]


@pytest.mark.parametrize("changed", ["seed", "identity", "position"])
def test_another_seed_identity_or_position_draws_otherwise(changed: str) -> None:
    def tokens(offset: int) -> list[int]:
        parts = {"seed": 0, "identity": 7, "position": 0}
        found = []
        for index in range(60):
            shifted = {**parts, changed: parts[changed] + index + offset}
            found.append(one(row(shifted.pop("position"), temperature=2.0, **shifted)).token_id)
        return found

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1000)


def test_random_numbers_are_uniform_and_identities_depend_on_order() -> None:
    numbers = [uniform(-3, 2**64 - 1, position) for position in range(4000)]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert np.mean(numbers) == pytest.approx(0.5, abs=0.03)
    assert len(set(numbers)) == 4000
    assert row_identity([1, 2]) != row_identity([2, 1])
    assert 0 <= row_identity([]) < 2**64


def test_penalties_lower_what_was_seen_and_presence_differs_from_frequency() -> None:
    assert one(row(repetition_penalty=3.0, token_ids=[1])).token_id == 2
    assert one(row(presence_penalty=1.5, token_ids=[1], new_token_ids=[])).token_id == 1
    assert one(row(presence_penalty=1.5, token_ids=[1], new_token_ids=[1])).token_id == 2
    assert one(row(presence_penalty=0.9, token_ids=[1] * 9, new_token_ids=[1] * 9)).token_id == 1
    assert one(row(frequency_penalty=0.3, token_ids=[1] * 3, new_token_ids=[1] * 3)).token_id == 1
    assert one(row(frequency_penalty=0.3, token_ids=[1] * 4, new_token_ids=[1] * 4)).token_id == 2


def test_a_repetition_penalty_lowers_negative_logits_too() -> None:
    logits = torch.tensor([-1.0, -1.5])
    assert one(row(repetition_penalty=2.0, token_ids=[0]), logits).token_id == 1


def test_logit_bias_moves_a_token_and_ignores_ids_that_do_not_exist() -> None:
    assert one(row(logit_bias={3: 10.0, 999: 50.0, -1: 50.0})).token_id == 3
    assert LOGITS[3] == -1


def test_nan_logits_fail_their_row_alone() -> None:
    """So do logits with nothing finite to choose."""
    logits = LOGITS.repeat(4, 1)
    logits[1, 0], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    for params in ({}, {"temperature": 1.0, "top_k": 3}):
        sampled = sample(logits, [row(**params) for _ in range(4)])
        assert sampled[0].error is None and sampled[0].token_id >= 0
        assert "NaN" in (sampled[1].error or "")
        assert [result.token_id for result in sampled[1:]] == [-1, -1, -1]
        assert all("no finite logit" in (result.error or "") for result in sampled[2:])


def test_a_grammar_that_masks_every_token_is_an_error_of_its_row() -> None:
    masked = row(allowed=np.zeros(SIZE, dtype=np.bool_), temperature=1.0)
    sampled = sample(LOGITS.repeat(2, 1), [masked, row()])
    assert sampled[0] == Sampled(-1, MIN_LOGPROB, error="the grammar allows no token here")
    assert sampled[1].token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_only_what_the_grammar_allows_is_sampled(temperature: float) -> None:
    allowed = np.asarray([True, False, False, True, False, False])
    found = {one(row(position, allowed=allowed, temperature=temperature)).token_id for position in range(200)}
    assert found == ({0} if temperature == 0 else {0, 3})


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30])
def test_extreme_temperatures_draw_from_what_there_is(temperature: float) -> None:
    found = {one(row(position, temperature=temperature)).token_id for position in range(60)}
    assert found == {1} if temperature < 1 else found <= {0, 1, 2, 3, 4} and len(found) > 2


def test_logprobs_are_those_of_the_model_clamped_and_with_the_likeliest_first() -> None:
    sampled = one(row(num_logprobs=SIZE))
    expected = torch.log_softmax(LOGITS, 0).clamp(min=MIN_LOGPROB)
    assert sampled.logprob == pytest.approx(float(expected[1]))
    assert [token_id for token_id, _ in sampled.top] == [1, 2, 4, 0, 3, 5]
    assert sampled.top[-1] == (5, MIN_LOGPROB)
    assert one(row(num_logprobs=0)).top == ()
    assert one(row(temperature=9.0, num_logprobs=1)).top[0][1] == pytest.approx(float(expected[1]))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_k": -2},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"max_new_tokens": -1},
        {"num_logprobs": 21},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"presence_penalty": math.nan},
        {"logit_bias": {3: math.nan}},
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="sampling: "):
        SamplingParams(**params)
