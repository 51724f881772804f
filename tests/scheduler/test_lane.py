"""One model's rows: the same tokens whatever the load, every row ends, and no page outlives its owner.

Tokens are compared exactly, logits closely, so that it holds for torch's kernels too, whose order of summation depends
on the batch. `test_bitwise.py` is the strict form, for the native ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch
from tiny_models import TinyEngine, prompt
from tiny_rows import GREEDY, alone, new_tokens, read, read_row, suffix_row
from transformers import PreTrainedModel

from antiphon.engine.batch import Batch, Phase
from antiphon.engine.errors import AbortedError, AntiphonError, CapacityError, InputError
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.runner import PendingStep, StepOutput
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.row import FinishReason, Row, RowKind

LENGTHS = (1, 63, 64, 65, 130, 190)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_new_tokens=6, temperature=1.5, seed=3)])
def test_cold_equals_warm_alone_equals_in_a_crowd_in_any_order(model: PreTrainedModel, params: SamplingParams) -> None:
    """vllm#40896, ik_llama#1932: the answers over a kept prefix, behind a crowd, in any order, are the cold ones."""
    heads, tails = [prompt(length) for length in LENGTHS], [prompt(length, seed=1) for length in (1, 5, 64)]
    pairs = [(head, tail) for head in range(len(heads)) for tail in range(len(tails))]
    cold = {(head, tail): alone(model, [*heads[head], *tails[tail]], params) for head, tail in pairs}
    assert len(set(cold.values())) > len(pairs) // 2
    engine = tiny.tiny_engine(model)
    prefixes = read(engine, *heads)
    for order in (pairs, pairs[::-1], pairs[::2] + pairs[1::2]):
        rows = [suffix_row(tails[tail], prefixes[head], params) for head, tail in order]
        assert new_tokens(engine, rows) == [cold[pair] for pair in order]


@pytest.mark.parametrize("num_pages", [4, 5, 9])
@pytest.mark.parametrize("step_tokens", [7, 64, 4096])
def test_small_pools_and_small_steps_give_the_same_tokens(
    model: PreTrainedModel, num_pages: int, step_tokens: int
) -> None:
    """Rows of up to 4 pages in a pool of 4 go one after another; steps of 7 tokens cut every prompt in pieces."""
    prompts = [prompt(length) for length in LENGTHS]
    expected = new_tokens(tiny.tiny_engine(model), [suffix_row(ids) for ids in prompts])
    engine = tiny.tiny_engine(model, num_pages=num_pages, step_tokens=step_tokens)
    assert new_tokens(engine, [suffix_row(ids) for ids in prompts]) == expected
    assert engine.lane.store.pool.num_free == num_pages


def step_logits(engine: TinyEngine, rows: list[Row]) -> list[torch.Tensor]:
    """Every row's first logits, as its gate is given them."""
    found: dict[int, torch.Tensor] = {}

    def gate(row: Row, logits: torch.Tensor) -> None:
        found[id(row)] = logits.clone()
        engine.lane.retire(row)

    for row in rows:
        row.gate = gate
    engine.run(rows)
    return [found[id(row)] for row in rows]


def test_logits_of_a_warm_row_in_a_crowd_are_close_to_those_of_a_cold_one_alone(model: PreTrainedModel) -> None:
    ids, tail = prompt(130), prompt(9, seed=1)
    cold = step_logits(tiny.tiny_engine(model), [suffix_row([*ids, *tail])])[0]
    engine = tiny.tiny_engine(model)
    first, second = read(engine, ids, prompt(65))
    crowd = [suffix_row(tail, first), suffix_row(tail, second), suffix_row(prompt(70, seed=2))]
    warm, other, _ = step_logits(engine, crowd)
    torch.testing.assert_close(warm, cold, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, cold, rtol=1e-4, atol=1e-4)


def test_a_warm_row_computes_its_suffix_alone(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    prefix = read(engine, prompt(130))[0]
    rows = [suffix_row(prompt(5, seed=1), prefix), suffix_row(prompt(64, seed=1), prefix)]
    engine.run(rows)
    costs = [(result.cached_tokens, result.prefill_tokens, result.decode_tokens) for result in results(rows)]
    assert costs == [(130, 5, 6), (130, 64, 6)]


def results(rows: list[Row]) -> list[Any]:
    return [row.future.result() for row in rows]


def test_reading_in_pieces_is_reading_whole(model: PreTrainedModel) -> None:
    ids, tail = prompt(190), prompt(3, seed=1)
    tokens = []
    for step_tokens in (1, 50, 64, 4096):
        engine = tiny.tiny_engine(model, step_tokens=step_tokens)
        row = suffix_row(tail, read(engine, ids)[0], SamplingParams(max_new_tokens=12))
        tokens += new_tokens(engine, [row])
    assert len(set(tokens)) == 1


def test_scores_do_not_depend_on_the_cut(model: PreTrainedModel) -> None:
    def scores(step_tokens: int) -> list[float]:
        row = suffix_row(prompt(70), params=SamplingParams(max_new_tokens=0), score_start=3, score_stop=69)
        tiny.tiny_engine(model, step_tokens=step_tokens).run([row])
        return row.scores

    assert len(scores(4096)) == 66
    assert scores(7) == pytest.approx(scores(4096), abs=1e-4)


def test_a_row_ends_on_an_end_token_unless_told_not_to(model: PreTrainedModel) -> None:
    plain = alone(model, prompt(20))
    eos_ids = frozenset({plain[2]})
    first = plain.index(plain[2])
    rows = [suffix_row(prompt(20)), suffix_row(prompt(20), params=SamplingParams(max_new_tokens=6, ignore_eos=True))]
    tiny.tiny_engine(model, eos_ids=eos_ids).run(rows)
    stopped, whole = results(rows)
    assert (stopped.new_token_ids, stopped.finish_reason) == (plain[: first + 1], FinishReason.STOP)
    assert (whole.new_token_ids, whole.finish_reason) == (plain, FinishReason.LENGTH)


def test_a_row_of_no_new_tokens_ends_with_its_prompt(model: PreTrainedModel) -> None:
    row = suffix_row(prompt(3), params=SamplingParams(max_new_tokens=0, num_logprobs=0))
    tiny.tiny_engine(model).run([row])
    result = row.future.result()
    assert (result.new_token_ids, result.logprobs, result.finish_reason) == ((), (), FinishReason.LENGTH)


def test_a_grammar_s_forced_tokens_cost_no_step_and_each_token_has_its_log_probability(model: PreTrainedModel) -> None:
    compiler = GrammarCompiler(tiny.tiny_tokenizer(), tiny.VOCABULARY)
    params = SamplingParams(max_new_tokens=40, num_logprobs=0)
    row = suffix_row(prompt(9), params=params, grammar=compiler.start('start: ("aXYZ" | "bXYZ") /[c-f]/ "!!"'))
    engine = tiny.tiny_engine(model)
    engine.run([row])
    result = row.future.result()
    text = tiny.tiny_tokenizer().decode(result.new_token_ids)
    assert text[1:4] == "XYZ" and text.endswith("!!") and len(text) == 7
    assert result.finish_reason is FinishReason.STOP
    assert engine.lane.num_steps == 2
    assert len(result.logprobs) == 7 and result.logprobs[1:4] == (0.0, 0.0, 0.0) and result.logprobs[0] < 0


def test_a_grammar_is_cut_at_the_length_asked_for(model: PreTrainedModel) -> None:
    compiler = GrammarCompiler(tiny.tiny_tokenizer(), tiny.VOCABULARY)
    row = suffix_row(prompt(9), params=SamplingParams(max_new_tokens=3), grammar=compiler.start('start: "aXYZ" /b+/'))
    tiny.tiny_engine(model).run([row])
    assert len(row.future.result().new_token_ids) == 3
    assert row.future.result().finish_reason is FinishReason.LENGTH


def test_a_row_larger_than_the_pool_is_refused_alone(model: PreTrainedModel) -> None:
    """vllm#39734: it fits no pool of 4 pages, so it is refused at once; the others run."""
    engine = tiny.tiny_engine(model, num_pages=4)
    rows = [suffix_row(prompt(20)), suffix_row(prompt(251)), suffix_row(prompt(250))]
    engine.run(rows)
    with pytest.raises(CapacityError, match="needs 5 KV pages, the whole pool has 4"):
        rows[1].future.result()
    assert len(rows[0].future.result().new_token_ids) == len(rows[2].future.result().new_token_ids) == 6


@pytest.mark.parametrize("ids", [[], [3, tiny.VOCABULARY], [-1], [2**70]])
def test_a_row_that_cannot_be_computed_is_refused_alone(model: PreTrainedModel, ids: list[int]) -> None:
    """vllm#7283, MEDS#176: no tokens, or ids that do not exist, must not end the others or the engine."""
    engine = tiny.tiny_engine(model)
    prefix = read(engine, prompt(64))[0]
    rows = [suffix_row(prompt(5)), suffix_row(ids), suffix_row(ids, prefix)]
    engine.run(rows)
    assert rows[0].future.result().new_token_ids == alone(model, prompt(5))
    for row in rows[1:]:
        with pytest.raises(InputError, match="tiny: "):
            row.future.result()


def test_a_waiting_row_that_pins_leave_no_room_for_is_failed_not_hung(model: PreTrainedModel) -> None:
    """vllm#45387: nothing runs and something waits."""
    engine = tiny.tiny_engine(model, num_pages=4)
    prefix = read(engine, prompt(180))[0]
    rows = [suffix_row(prompt(70)), suffix_row(prompt(5), prefix)]
    engine.run(rows)
    with pytest.raises(CapacityError, match="the rest is pinned by prefixes"):
        rows[0].future.result()
    assert len(rows[1].future.result().new_token_ids) == 6


def test_an_idle_conversation_makes_room_for_a_waiting_row(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model, num_pages=4)
    turn = Row(RowKind.DRIVER, prompt(150), GREEDY, owner="conversation", use_cached=True)
    rows = [turn, suffix_row(prompt(190))]
    for row in rows:
        engine.run([row])
        assert len(row.future.result().new_token_ids) == 6
    again = Row(RowKind.DRIVER, [*turn.token_ids, *prompt(3)], GREEDY, owner="conversation", use_cached=True)
    engine.run([again])
    assert again.future.result().new_token_ids == alone(model, [*turn.token_ids, *prompt(3)])


def test_conversations_that_wait_for_each_other_s_pages_both_end(model: PreTrainedModel) -> None:
    """Each of two has 2 of 4 pages and needs 3: one gives way, is computed again, and says the same."""
    engine = tiny.tiny_engine(model, num_pages=4)
    turns = [Row(RowKind.DRIVER, prompt(110, seed), GREEDY, owner=seed, use_cached=True) for seed in range(2)]
    engine.run(turns)
    longer = [[*turn.token_ids, *prompt(40)] for turn in turns]
    rows = [Row(RowKind.DRIVER, list(ids), GREEDY, owner=seed, use_cached=True) for seed, ids in enumerate(longer)]
    assert new_tokens(engine, rows) == [alone(model, ids) for ids in longer]


def test_what_an_owner_s_cancelled_turn_left_is_not_taken_for_another_s_tokens(model: PreTrainedModel) -> None:
    """The turn ended well, but its owner never saw the result and asks again from before it."""
    engine = tiny.tiny_engine(model)
    for ids in (prompt(150), prompt(150), [*prompt(150)[:100], *prompt(20, seed=1)]):
        row = Row(RowKind.DRIVER, list(ids), GREEDY, owner="session", use_cached=True)
        engine.run([row])
        assert row.future.result().new_token_ids == alone(model, ids)
        assert row.future.result().cached_tokens % 64 == 0


def test_a_prefix_released_while_a_row_waits_fails_that_row_alone(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model, num_pages=5)
    prefix = read(engine, prompt(65))[0]
    first, second = suffix_row(prompt(100, seed=1)), suffix_row(prompt(5), prefix, SamplingParams(max_new_tokens=70))
    engine.lane.submit(first)
    engine.lane.submit(second)
    engine.lane.step()
    engine.lane.store.disuse(prefix)
    third = suffix_row(prompt(100, seed=2))
    engine.run([third])
    with pytest.raises(AntiphonError, match="was released"):
        second.future.result()
    assert first.future.result().new_token_ids == alone(model, prompt(100, seed=1))
    assert third.future.result().new_token_ids == alone(model, prompt(100, seed=2))


@pytest.mark.parametrize("num_steps", range(9))
def test_an_abort_at_any_step_frees_every_page(model: PreTrainedModel, num_steps: int) -> None:
    """Rows of every kind, waiting, reading, extending, decoding, held by a gate and ended."""
    engine = tiny.tiny_engine(model, num_pages=9, step_tokens=60)
    rows = [
        Row(RowKind.DRIVER, prompt(70), GREEDY, owner="session", use_cached=True),
        suffix_row(prompt(65)),
        suffix_row(prompt(30), gate=lambda row, logits: None),
        read_row(prompt(129)),
        suffix_row(prompt(180, seed=1)),
    ]
    for row in rows:
        engine.lane.submit(row)
    for _ in range(num_steps):
        engine.lane.step()
        engine.lane.check_integrity()
    engine.lane.abort(rows)
    engine.lane.drop_kept("session")
    engine.lane.check_integrity()
    assert not engine.lane.has_work
    declared = [row.future.result().prefix for row in rows if row.future.exception() is None and row.keep]
    for prefix in declared:
        engine.lane.store.disuse(prefix)
    engine.lane.store.clear_cached()
    assert engine.lane.store.pool.num_free == 9
    assert all(row.future.exception() is None or isinstance(row.future.exception(), AbortedError) for row in rows)
    assert engine.lane.store.cache.k.isnan().all()


def test_dropping_an_owner_ends_what_runs_for_it(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    row = Row(RowKind.DRIVER, prompt(70), GREEDY, owner="session")
    engine.lane.submit(row)
    engine.lane.step()
    engine.lane.drop_kept("session")
    engine.core.run_until_idle()
    assert isinstance(row.future.exception(), AbortedError)
    assert engine.lane.store.pool.num_free == 64


def test_an_exception_in_a_step_ends_the_rows_of_its_batch_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.tiny_engine(model)
    launch = engine.lane._runner.launch

    def failing(batch: Batch) -> PendingStep:
        if batch.phase is Phase.READ:
            raise RuntimeError("out of memory")
        return launch(batch)

    monkeypatch.setattr(engine.lane._runner, "launch", failing)
    rows = [suffix_row(prompt(5)), read_row(prompt(70)), read_row(prompt(9)), suffix_row(prompt(6))]
    engine.run(rows)
    assert [row.future.exception() is None for row in rows] == [True, False, False, True]
    assert str(rows[1].future.exception()) == "out of memory"
    assert engine.lane.store.pool.num_free == 64


def test_nan_logits_end_their_row_alone(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.tiny_engine(model)
    launch = engine.lane._runner.launch

    def poisoned(batch: Batch) -> PendingStep:
        output = launch(batch).result()
        logits = output.logits.clone()
        logits[0] = float("nan")
        return PendingStep(StepOutput(logits, output.scores))

    monkeypatch.setattr(engine.lane._runner, "launch", poisoned)
    rows = [suffix_row(prompt(5)), suffix_row(prompt(6), params=SamplingParams(max_new_tokens=1))]
    engine.run(rows)
    assert "NaN" in str(rows[0].future.exception())
    assert rows[1].future.result().new_token_ids == alone(model, prompt(6))[:1]
