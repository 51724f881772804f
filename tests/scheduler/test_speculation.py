"""Drafts change how soon a row ends and nothing else: its tokens, log-probabilities, scores and pages are the same.

`RowResult`s are compared whole, on the native kernels: with drafts and without, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TinyEngine, prompt
from tiny_rows import read, suffix_row
from transformers import PreTrainedModel

from antiphon.engine.batch import Batch
from antiphon.engine.errors import AbortedError
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.runner import PendingStep
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler import verification
from antiphon.scheduler.draft_depth import DepthChooser
from antiphon.scheduler.quoted_text import QuotedText
from antiphon.scheduler.row import FinishReason, Row, RowKind, RowResult
from antiphon.scheduler.speculation import MAX_DRAFT_TOKENS

HEADS = [prompt(length) for length in (1, 61, 63, 64, 65, 130)]
TAIL = prompt(3, seed=1)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.7, seed=3, num_logprobs=2)
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=40),
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, top_p=0.9),
}
GRAMMAR = 'start: "{" (/[a-d]{1,5}/ "XYZ")~6 /[a-z]{2,9}/ "}"'


class FixedDepths(DepthChooser):
    """Drafts this deep, row by row, whatever it costs."""

    def __init__(self, *depths: int) -> None:
        super().__init__()
        self.depths = depths

    def choose(self, match_tokens: Sequence[int], limits: Sequence[int], num_rows: int, num_tokens: int) -> list[int]:
        return [min(self.depths[index % len(self.depths)], limit) for index, limit in enumerate(limits)]


def right_for(num_tokens: int) -> Callable[[Sequence[int]], list[int]]:
    """A text in which every two tokens of a reply are followed by so many right tokens and a wrong one."""

    def text(reply: Sequence[int]) -> list[int]:
        pieces = [reply[start : start + 2 + num_tokens] for start in range(len(reply) - 2 - num_tokens)]
        return [token for piece in pieces for token in (*piece, (piece[-1] + 1) % tiny.VOCABULARY, 0)]

    return text


DRAFTS: dict[str, Callable[[Sequence[int]], Sequence[int]]] = {
    "right": lambda reply: reply,
    "right for 1": right_for(1),
    "right for 3": right_for(3),
    "wrong": lambda reply: [
        token
        for start in range(len(reply) - 2)
        for token in (*reply[start : start + 2], (reply[start + 2] + 1) % tiny.VOCABULARY)
    ],
}


def engine_with(model: PreTrainedModel, *depths: int, **parts: Any) -> TinyEngine:
    """Checks at every step that nothing is written to a page that a prefix or another row has."""
    engine = tiny.tiny_engine(model, speculation=bool(depths), **parts)
    engine.lane.speculator.chooser = FixedDepths(*depths)
    launch = engine.lane._runner.launch

    def checked(batch: Batch) -> PendingStep:
        written = set((batch.slots() // 64).tolist())
        assert -1 not in written
        assert not written & {page for pages in engine.lane.store.holders() for page in pages}
        return launch(batch)

    engine.lane._runner.launch = checked  # type: ignore[method-assign]
    return engine


def results(rows: Sequence[Row]) -> list[RowResult]:
    return [row.future.result() for row in rows]


def warm_results(engine: TinyEngine, params: SamplingParams, texts: Sequence[Sequence[int]] | None) -> list[RowResult]:
    """A row over each head, all in one step, its tail scored."""
    rows = [
        suffix_row(TAIL, prefix, params, score_start=prefix.num_tokens + 1, score_stop=prefix.num_tokens + len(TAIL))
        for prefix in read(engine, *HEADS)
    ]
    for row, text in zip(rows, texts or [], strict=texts is not None):
        row.quotes = QuotedText(text)
    engine.run(rows)
    return results(rows)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("narrow", [False, True])
def test_rows_with_drafts_of_any_depth_and_quality_end_as_those_without(
    model: PreTrainedModel, drafts: str, params: str, narrow: bool
) -> None:
    """Over heads before, at and behind a page's edge; six rows of different depths in each step."""
    precision = {"weight_dtype": torch.int8, "kv_dtype": torch.int8} if narrow else {}
    plain_engine = engine_with(model, **precision)
    plain = warm_results(plain_engine, PARAMS[params], None)
    engine = engine_with(model, 16, 1, 3, 0, 7, 5, **precision)
    texts = [DRAFTS[drafts](result.new_token_ids) for result in plain]
    assert warm_results(engine, PARAMS[params], texts) == plain
    counters = engine.lane.counters
    assert counters.drafted_tokens > 100
    if drafts == "right" and params != "greedy":  # a greedy reply of this model repeats itself
        assert counters.accepted_tokens == counters.drafted_tokens
    assert (counters.accepted_tokens > 0) == (drafts != "wrong") or params == "greedy"


def test_drafts_that_are_right_save_steps(model: PreTrainedModel) -> None:
    ids = prompt(70)
    plain, quoting = suffix_row(ids, params=SAMPLED), suffix_row(ids, params=SAMPLED)
    slow, fast = engine_with(model), engine_with(model, 7)
    slow.run([plain])
    quoting.quotes = QuotedText(results([plain])[0].new_token_ids)
    fast.run([quoting])
    assert results([quoting]) == results([plain])
    assert slow.lane.num_steps == 40
    # The first two tokens have nothing to match; then come 8 a step.
    assert fast.lane.num_steps == 2 + 5
    assert (fast.lane.counters.decode_steps, fast.lane.counters.accepted_tokens) == (6, 33)


def test_accepting_one_token_too_many_is_seen(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    plain = warm_results(engine_with(model), SAMPLED, None)
    texts = [DRAFTS["wrong"](result.new_token_ids) for result in plain]
    monkeypatch.setattr(verification, "_num_equal", lambda left, right: min(len(left), len(right)))
    assert warm_results(engine_with(model, 1), SAMPLED, texts) != plain


@pytest.mark.parametrize("depth", [1, 4, 16])
@pytest.mark.parametrize("params", ["sampled", "penalties"])
def test_a_grammar_s_forced_tokens_and_end_inside_a_draft_change_nothing(
    model: PreTrainedModel, params: str, depth: int
) -> None:
    compiler = GrammarCompiler(tiny.tiny_tokenizer(), tiny.VOCABULARY)

    def replies(engine: TinyEngine, texts: Sequence[Sequence[int]]) -> list[RowResult]:
        rows = [
            suffix_row(head, params=replace(PARAMS[params], max_new_tokens=99), grammar=compiler.start(GRAMMAR))
            for head in HEADS
        ]
        for row, text in zip(rows, texts, strict=False):
            row.quotes = QuotedText(text)
        engine.run(rows)
        return results(rows)

    plain = replies(engine_with(model), ())
    assert {result.finish_reason for result in plain} == {FinishReason.STOP}
    # The text goes on behind the reply's end, with what the grammar could not take and with what it could.
    texts = [[*result.new_token_ids, *prompt(9), *right_for(1)(result.new_token_ids)] for result in plain]
    engine = engine_with(model, depth)
    assert replies(engine, texts) == plain
    assert engine.lane.counters.accepted_tokens > 0


@pytest.mark.parametrize("end", [2, 3, 9, 20])
def test_an_end_token_inside_a_draft_ends_the_row(model: PreTrainedModel, end: int) -> None:
    ids = prompt(65)
    whole = suffix_row(ids, params=SAMPLED)
    engine_with(model).run([whole])
    text = results([whole])[0].new_token_ids
    found = []
    for depths in ((), (16,)):
        row = suffix_row(ids, params=SAMPLED, quotes=QuotedText(text))
        engine_with(model, *depths, eos_ids=frozenset({text[end]})).run([row])
        found += results([row])
    assert found[0] == found[1]
    assert found[0].new_token_ids == text[: text.index(text[end]) + 1]


@pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5, 19, 20, 21])
def test_no_draft_goes_past_a_row_s_last_token_or_page(model: PreTrainedModel, num_new: int) -> None:
    """45 + 19 tokens fill a page to its end. `engine_with` sees a slot without a page."""
    params = replace(SAMPLED, max_new_tokens=num_new)
    rows = [suffix_row(prompt(45), params=params) for _ in range(2)]
    engine_with(model).run(rows[:1])
    rows[1].quotes = QuotedText([*results(rows[:1])[0].new_token_ids, *prompt(40, seed=5)])
    engine_with(model, MAX_DRAFT_TOKENS).run(rows[1:])
    assert results(rows[1:]) == results(rows[:1])


def test_a_conversation_goes_on_from_a_turn_that_had_drafts(model: PreTrainedModel) -> None:
    """What is kept for its owner ends where the last turn's drafts did not come true."""

    def turns(engine: TinyEngine, text: Sequence[int] | None) -> list[RowResult]:
        ids, found = prompt(50), []
        for turn in range(3):
            row = Row(RowKind.DRIVER, ids, SAMPLED, owner="conversation", use_cached=True)
            row.quotes = None if text is None else QuotedText(text)
            engine.run([row])
            found += results([row])
            ids = [*row.token_ids, *prompt(20, seed=turn)]
        return found

    plain = turns(engine_with(model), None)
    text = [token for result in plain for token in right_for(3)(result.new_token_ids)]
    engine = engine_with(model, 5)
    assert turns(engine, text) == plain
    assert 0 < engine.lane.counters.accepted_tokens < engine.lane.counters.drafted_tokens


@pytest.mark.parametrize("num_steps", range(2, 8))
def test_rows_aborted_between_drafts_give_back_every_page(model: PreTrainedModel, num_steps: int) -> None:
    expected = suffix_row(prompt(65), params=SAMPLED)
    engine_with(model).run([expected])
    text = results([expected])[0].new_token_ids
    engine = engine_with(model, 5)
    rows = [suffix_row(prompt(65), params=SAMPLED, quotes=QuotedText(text)) for _ in range(3)]
    for row in rows:
        engine.lane.submit(row)
    for _ in range(num_steps):
        engine.lane.step()
        engine.lane.check_integrity()
    engine.lane.abort(rows[::2])
    engine.core.run_until_idle()
    assert results(rows[1:2]) == results([expected])
    assert all(isinstance(row.future.exception(), AbortedError) for row in rows[::2])
    assert engine.lane.store.pool.num_free == 64


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_text_of_parts_of_the_reply_changes_nothing(model: PreTrainedModel, data: st.DataObject) -> None:
    """Prompts, lengths, depths, step sizes and texts as they come."""
    draw = data.draw
    ids = prompt(draw(st.integers(1, 70)))
    params = replace(SAMPLED, max_new_tokens=draw(st.integers(1, 40)), seed=draw(st.integers(0, 3)))
    plain = suffix_row(ids, params=params)
    engine_with(model).run([plain])
    reply = results([plain])[0].new_token_ids
    cuts = draw(st.lists(st.tuples(st.integers(0, 39), st.integers(0, 12), st.integers(0, 210)), max_size=12))
    text = [token for start, length, other in cuts for token in (*reply[start : start + length], other)]
    depths = draw(st.lists(st.integers(0, MAX_DRAFT_TOKENS), min_size=1, max_size=3))
    rows = [suffix_row(ids, params=params, quotes=QuotedText(text)) for _ in range(draw(st.integers(1, 4)))]
    engine = engine_with(model, *depths, step_tokens=draw(st.integers(1, 96)))
    engine.run(rows)
    assert results(rows) == results([plain]) * len(rows)
    assert engine.lane.counters.accepted_tokens <= engine.lane.counters.drafted_tokens
