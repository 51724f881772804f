"""Which rows of a query go on: abstaining rows cost no decode step, the likeliest are kept exactly, none hangs."""

from __future__ import annotations

import pytest
import tiny_models as tiny
import torch
from tiny_models import TinyEngine, prompt
from transformers import PreTrainedModel

from antiphon.engine.errors import InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.gate import Gate, GateKind, GateOptions
from antiphon.scheduler.row import FinishReason, Row, RowKind

GREEDY = SamplingParams(max_new_tokens=4)
PROMPTS = [prompt(20, seed) for seed in range(8)]


def rows_of(prompts: list[list[int]], *, scores: bool = False) -> list[Row]:
    rows = [Row(RowKind.SUFFIX, list(ids), GREEDY) for ids in prompts]
    for row in rows:
        row.score_start, row.score_stop = (5, 18) if scores else (0, 0)
    return rows


def gated(engine: TinyEngine, rows: list[Row], options: GateOptions, abstain: tuple[int, ...] = ()) -> Gate:
    gate = Gate(options, engine.lane, abstain, len(rows))
    for row in rows:
        gate.watch(row)
    engine.run(rows)
    return gate


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[Row]:
    """The same rows without a gate: their tokens and scores."""
    rows = rows_of(PROMPTS, scores=True)
    tiny.tiny_engine(model).run(rows)
    return rows


def went_on(rows: list[Row]) -> list[int]:
    ended = [row.future.result().finish_reason for row in rows]
    return [index for index, reason in enumerate(ended) if reason is not FinishReason.GATED]


@pytest.mark.parametrize("num_pages", [1, 2, 64])
def test_rows_whose_first_token_abstains_end_with_no_decode_step(
    model: PreTrainedModel, plain: list[Row], num_pages: int
) -> None:
    """The others say exactly what they say without a gate, also where one row at a time fits the pool."""
    firsts = [row.new_token_ids[0] for row in plain]
    abstain = (firsts[1], firsts[4], firsts[6])
    rows = rows_of(PROMPTS)
    gate = gated(tiny.tiny_engine(model, num_pages=num_pages), rows, GateOptions("first-token"), abstain)
    expected = [index for index, first in enumerate(firsts) if first not in abstain]
    assert 0 < len(expected) < 8
    assert went_on(rows) == expected
    assert gate.abstained == {row for index, row in enumerate(rows) if index not in expected}
    for index, row in enumerate(rows):
        result = row.future.result()
        assert result.new_token_ids == (tuple(plain[index].new_token_ids) if index in expected else ())
        assert result.decode_tokens == len(result.new_token_ids)


def test_when_all_abstain_no_step_decodes(model: PreTrainedModel, plain: list[Row]) -> None:
    rows = rows_of(PROMPTS)
    engine = tiny.tiny_engine(model, step_tokens=4096)
    gated(engine, rows, GateOptions("first-token"), tuple(row.new_token_ids[0] for row in plain))
    assert went_on(rows) == [] and engine.lane.num_steps == 1


@pytest.mark.parametrize("num_pages", [1, 2, 3, 64])
@pytest.mark.parametrize("readers", [1, 3, 8, 20])
def test_the_likelihood_gate_keeps_exactly_the_likeliest(
    model: PreTrainedModel, plain: list[Row], readers: int, num_pages: int
) -> None:
    """Held rows give their pages to those that wait, so that the pool's size changes nothing but the time."""
    means = [sum(row.scores) / len(row.scores) for row in plain]
    best = sorted(range(8), key=lambda index: -means[index])[:readers]
    rows = rows_of(PROMPTS, scores=True)
    engine = tiny.tiny_engine(model, num_pages=num_pages)
    gate = gated(engine, rows, GateOptions("likelihood", readers))
    assert went_on(rows) == sorted(best)
    assert gate.chosen == [rows[index] for index in best]
    for index in best:
        assert rows[index].new_token_ids == plain[index].new_token_ids
    for index, row in enumerate(rows):
        assert row.future.result().mean_score == pytest.approx(means[index], abs=1e-4)
    assert engine.lane.store.pool.num_free == num_pages


def test_both_keeps_the_likeliest_of_those_that_do_not_abstain(model: PreTrainedModel, plain: list[Row]) -> None:
    means = [sum(row.scores) / len(row.scores) for row in plain]
    ranked = sorted(range(8), key=lambda index: -means[index])
    abstain = plain[ranked[0]].new_token_ids[0]
    left = [index for index in ranked if plain[index].new_token_ids[0] != abstain]
    rows = rows_of(PROMPTS, scores=True)
    gated(tiny.tiny_engine(model), rows, GateOptions("both", 2), (abstain,))
    assert went_on(rows) == sorted(left[:2])


@pytest.mark.parametrize("step_tokens", [7, 64, 4096])
def test_ties_go_to_the_first_rows_whatever_the_steps(model: PreTrainedModel, step_tokens: int) -> None:
    """Six equal rows: the batch must not decide among them."""
    rows = rows_of([PROMPTS[0]] * 6, scores=True)
    engine = tiny.tiny_engine(model, step_tokens=step_tokens)
    gate = Gate(GateOptions("likelihood", 2), engine.lane, (), 6)
    gate._rank = lambda row, logits: 0.5  # type: ignore[method-assign]
    for row in rows:
        gate.watch(row)
    engine.run(rows)
    assert went_on(rows) == [0, 1]


def test_readers_without_decoding_are_named_and_end(model: PreTrainedModel) -> None:
    rows = rows_of(PROMPTS, scores=True)
    gate = gated(tiny.tiny_engine(model), rows, GateOptions("likelihood", 3, readers_decode=False))
    assert went_on(rows) == []
    assert len(gate.chosen) == 3
    assert sum(row.future.result().decode_tokens for row in rows) == 0


def test_without_scores_rows_are_ranked_by_how_much_finding_beats_abstaining(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    gate = Gate(GateOptions("first-token", 1), engine.lane, (5, 9), 1)
    row = Row(RowKind.SUFFIX, [1], GREEDY)
    row.first_token_id = 2
    logits = torch.zeros(tiny.VOCABULARY)
    logits[2], logits[5], logits[9] = 3.0, 1.0, 2.5
    assert gate._rank(row, logits) == 0.5


@pytest.mark.parametrize("kind", ["first-token", "likelihood", "both", "none"])
def test_rows_that_fail_before_they_are_offered_do_not_hang_the_gate(model: PreTrainedModel, kind: GateKind) -> None:
    """The first and the last row are refused: the gate must not wait for them."""
    rows = rows_of([[*PROMPTS[0], 10**6], *PROMPTS[1:4], []], scores=True)
    engine = tiny.tiny_engine(model)
    gated(engine, rows, GateOptions(kind, 2))
    assert [row.future.exception() is None for row in rows] == [False, True, True, True, False]
    assert sum(bool(row.new_token_ids) for row in rows) == 2


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_at_any_step_frees_the_rows_that_the_gate_holds(model: PreTrainedModel, num_steps: int) -> None:
    engine = tiny.tiny_engine(model, num_pages=5, step_tokens=40)
    rows = rows_of(PROMPTS, scores=True)
    gate = Gate(GateOptions("likelihood", 3), engine.lane, (), len(rows))
    for row in rows:
        gate.watch(row)
        engine.lane.submit(row)
    for _ in range(num_steps):
        engine.lane.step()
    engine.lane.abort(rows)
    engine.core.run_until_idle()
    assert all(row.future.done() for row in rows)
    assert engine.lane.store.pool.num_free == 5


@pytest.mark.parametrize(
    ("kind", "readers", "message"),
    [("likely", None, "'likely' is unknown"), ("first-token", 0, "at least 1"), ("likelihood", None, "needs a number")],
)
def test_options_that_make_no_sense_are_refused(kind: GateKind, readers: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GateOptions(kind, readers)
