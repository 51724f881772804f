"""What goes into each step: urgent rows first, the oldest round first, and nothing starves."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny
from tiny_models import TinyEngine, prompt
from tiny_rows import GREEDY, alone, read, read_row, suffix_row
from transformers import PreTrainedModel

from antiphon.engine.batch import Batch, Phase
from antiphon.engine.runner import PendingStep
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.plan import plan_batch
from antiphon.scheduler.row import Row, RowKind


def phases(engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Phase, int]]:
    seen: list[tuple[Phase, int]] = []
    launch = engine.lane._runner.launch

    def recording(batch: Batch) -> PendingStep:
        seen.append((batch.phase, len(batch.token_ids)))
        return launch(batch)

    monkeypatch.setattr(engine.lane._runner, "launch", recording)
    return seen


def test_driver_rows_go_first_then_suffixes_then_reads(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.tiny_engine(model)
    seen = phases(engine, monkeypatch)
    driver = Row(RowKind.DRIVER, prompt(11), SamplingParams(max_new_tokens=2))
    engine.run([read_row(prompt(13)), suffix_row(prompt(12), params=SamplingParams(max_new_tokens=2)), driver])
    assert [size for _, size in seen] == [11, 1, 12, 1, 13]


def test_the_oldest_round_goes_first_and_decodes_together(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.tiny_engine(model, step_tokens=20)
    seen = phases(engine, monkeypatch)
    params = SamplingParams(max_new_tokens=3)
    engine.run([suffix_row(prompt(size), params=params, order=order) for size, order in ((15, 2), (14, 1), (6, 1))])
    assert [size for _, size in seen] == [20, 2, 2, 15, 1, 1]


@pytest.mark.parametrize("busy", [RowKind.DRIVER, RowKind.SUFFIX])
def test_reads_are_not_starved_by_more_urgent_rows(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, busy: RowKind
) -> None:
    engine = tiny.tiny_engine(model)
    seen = phases(engine, monkeypatch)
    reading, long = read_row(prompt(30)), Row(busy, prompt(5), SamplingParams(max_new_tokens=60))
    engine.run([reading, long])
    assert [phase for phase, _ in seen].index(Phase.READ) <= 17


def test_suffixes_are_not_starved_by_driver_rows(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.tiny_engine(model)
    seen = phases(engine, monkeypatch)
    engine.run([suffix_row(prompt(30)), Row(RowKind.DRIVER, prompt(5), SamplingParams(max_new_tokens=60))])
    assert (Phase.EXTEND, 30) in seen[:18]


def test_a_less_urgent_row_does_not_take_the_pages_that_an_urgent_one_waits_for(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model, num_pages=6)
    running, urgent = suffix_row(prompt(190)), Row(RowKind.DRIVER, prompt(180), GREEDY)
    engine.lane.submit(running)
    engine.lane.step()
    reading = read_row(prompt(60))
    engine.lane.submit(reading)
    engine.lane.submit(urgent)
    engine.lane.step()
    assert not reading.pages and not urgent.pages
    engine.core.run_until_idle()
    assert urgent.future.result().new_token_ids == alone(model, prompt(180))


def test_a_batch_has_every_field_filled_from_its_pieces(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    prefix = read(engine, prompt(70))[0]
    rows = [suffix_row(prompt(9, seed=1), prefix, score_start=72, score_stop=77), suffix_row(prompt(20))]
    for row in rows:
        engine.lane.submit(row)
    engine.lane._admission.admit(engine.lane._live, engine.lane._fail)
    picked = engine.lane._pick()
    assert picked is not None
    batch = plan_batch(*picked)
    assert batch.phase is Phase.EXTEND
    assert batch.token_ids.tolist() == [*prompt(9, seed=1), *prompt(20)]
    assert batch.positions.tolist() == [*range(70, 79), *range(20)]
    assert batch.row_starts.tolist() == [0, 9, 29]
    assert batch.context_tokens.tolist() == [70, 0]
    assert batch.block_tables.dtype == np.int32
    assert batch.block_tables.tolist() == [rows[0].pages, [*rows[1].pages, -1]]
    assert batch.logit_tokens.tolist() == [8, 28]
    assert batch.score_tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.score_targets.tolist() == rows[0].token_ids[72:77]
    engine.core.run_until_idle()
