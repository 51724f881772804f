"""A conversation as tokens: every turn computes only what is new, and a failed turn loses nothing but itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import tiny_models as tiny
from tiny_models import prompt, running_client
from transformers import PreTrainedModel

from antiphon.engine.errors import AbortedError, AntiphonError, CapacityError, InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.row import Row, RowKind
from antiphon.scheduler.session import Session, TextStream

T = TypeVar("T")

GREEDY = SamplingParams(max_new_tokens=6)
TOKENIZER = tiny.tiny_tokenizer()
END = min(TOKENIZER.eos_ids)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def session(client: LaneClient, max_tokens: int = 1000) -> Session:
    return Session(client, TOKENIZER, END, max_tokens)


def fresh_tokens(model: PreTrainedModel, ids: list[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    row = Row(RowKind.SUFFIX, list(ids), params)
    tiny.tiny_engine(model).run([row])
    return row.future.result().new_token_ids


@pytest.mark.parametrize("length", [5, 63, 64, 65, 120])
def test_each_turn_continues_all_that_was_computed_before(model: PreTrainedModel, length: int) -> None:
    """Cached tokens of a turn are all tokens before it but the last generated one and the end token behind it."""
    with running_client(tiny.tiny_engine(model)) as client:
        talk, history = session(client), []
        cached = 0
        for turn in range(4):
            talk.append(prompt(length, seed=turn))
            history += prompt(length, seed=turn)
            made = run(talk.generate(GREEDY))
            assert made.token_ids == fresh_tokens(model, history)
            assert made.finish_reason == "length"
            assert (made.cached_tokens, made.decode_tokens) == (cached, 6)
            assert made.prefill_tokens == len(history) - cached
            cached = len(history) + 5
            history += [*made.token_ids, END]
            assert talk.token_ids == history
            assert talk.free_tokens == 1000 - len(history)
        talk.close()


def test_a_turn_that_ended_by_itself_is_not_ended_twice(model: PreTrainedModel) -> None:
    plain = fresh_tokens(model, prompt(20))
    engine = tiny.tiny_engine(model, eos_ids=TOKENIZER.eos_ids)
    bias = SamplingParams(max_new_tokens=6, logit_bias={END: 1000.0})
    with running_client(engine) as client:
        talk = session(client)
        talk.append(prompt(20))
        made = run(talk.generate(bias))
        assert (made.token_ids, made.text, made.finish_reason) == ((END,), "", "stop")
        assert talk.token_ids == [*prompt(20), END]
        talk.append(prompt(3))
        assert run(talk.generate(GREEDY)).text != TOKENIZER.decode(plain)
        talk.close()


def test_a_grammar_holds_for_one_turn(model: PreTrainedModel) -> None:
    with running_client(tiny.tiny_engine(model)) as client:
        talk = session(client)
        talk.append(prompt(20))
        made = run(talk.generate(GREEDY, 'start: "yes" | "no"'))
        assert made.text in ("yes", "no") and made.finish_reason == "stop"
        assert talk.token_ids[-1] == END
        talk.append(prompt(3))
        assert run(talk.generate(GREEDY)).text not in ("yes", "no")
        with pytest.raises(InputError, match="grammar: "):
            talk.append(prompt(3))
            run(talk.generate(GREEDY, "start: ["))
        assert len(run(talk.generate(GREEDY)).token_ids) == 6
        talk.close()


def test_another_session_finds_the_full_pages_of_the_same_beginning(model: PreTrainedModel) -> None:
    with running_client(tiny.tiny_engine(model)) as client:
        first, second, third = session(client), session(client), session(client)
        first.append(prompt(200))
        assert run(first.generate(GREEDY)).cached_tokens == 0
        second.append([*prompt(200)[:140], *prompt(30, seed=1)])
        made = run(second.generate(GREEDY))
        assert (made.cached_tokens, made.prefill_tokens) == (128, 42)
        assert made.token_ids == fresh_tokens(model, [*prompt(200)[:140], *prompt(30, seed=1)])
        first.close()
        third.append(prompt(200))
        assert run(third.generate(GREEDY)).cached_tokens == 192
        second.close()
        third.close()


def test_a_turn_that_failed_midway_can_be_tried_again(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        talk = session(client)
        talk.append(prompt(100))
        first = run(talk.generate(GREEDY))
        talk.append(prompt(30, seed=1))
        history = list(talk.token_ids)
        launch, calls = engine.lane._runner.launch, []

        def failing(batch: Any) -> Any:
            calls.append(batch)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return launch(batch)

        monkeypatch.setattr(engine.lane._runner, "launch", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(talk.generate(GREEDY))
        assert talk.token_ids == history
        made = run(talk.generate(GREEDY))
        assert made.cached_tokens == 64
        assert made.token_ids == fresh_tokens(model, history)
        assert history[100:106] == list(first.token_ids)
        talk.close()


def test_a_cancelled_turn_can_be_tried_again_whenever_it_was_cancelled(model: PreTrainedModel) -> None:
    async def cancel_after(talk: Session, seconds: float) -> None:
        task = asyncio.create_task(talk.generate(GREEDY))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    expected = fresh_tokens(model, prompt(100))
    engine = tiny.tiny_engine(model, step_tokens=20)
    with running_client(engine) as client:
        for delay in range(6):
            talk = session(client)
            talk.append(prompt(100))
            run(cancel_after(talk, delay * 0.004))
            if talk.token_ids == prompt(100):
                assert run(talk.generate(GREEDY)).token_ids == expected
            talk.close()
        run(client.call(engine.lane.store.clear_cached))
        assert engine.lane.store.pool.num_free == 64


def test_what_cannot_fit_is_refused_before_anything_is_computed(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        talk = session(client, max_tokens=30)
        talk.append(prompt(24))
        with pytest.raises(CapacityError, match="24 tokens and 6 new ones do not fit the context of 30"):
            run(talk.generate(GREEDY))
        assert engine.lane.num_steps == 0
        assert len(run(talk.generate(SamplingParams(max_new_tokens=5))).token_ids) == 5
        assert talk.free_tokens == 0
        talk.close()


def test_a_turn_needs_something_new_to_read(model: PreTrainedModel) -> None:
    with running_client(tiny.tiny_engine(model)) as client:
        talk = session(client)
        with pytest.raises(AntiphonError, match="nothing was appended"):
            run(talk.generate(GREEDY))
        talk.append(prompt(5))
        run(talk.generate(GREEDY))
        with pytest.raises(AntiphonError, match="nothing was appended"):
            run(talk.generate(GREEDY))
        talk.close()


def test_a_closed_session_holds_no_page_and_takes_no_turn(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        talk = session(client)
        talk.append(prompt(100))
        run(talk.generate(GREEDY))
        talk.close()
        talk.close()
        run(client.call(engine.lane.store.clear_cached))
        assert engine.lane.store.pool.num_free == 64
        with pytest.raises(AntiphonError, match="it was closed"):
            run(talk.generate(GREEDY))


def test_closing_a_session_ends_the_turn_that_is_under_way(model: PreTrainedModel) -> None:
    async def closed(talk: Session, client: LaneClient) -> None:
        task = asyncio.create_task(talk.generate(SamplingParams(max_new_tokens=2000)))
        while client.lane.num_steps < 2:
            await asyncio.sleep(0.001)
        talk.close()
        with pytest.raises(AbortedError):
            await task

    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        talk = session(client, max_tokens=4000)
        talk.append(prompt(100))
        run(closed(talk, client))
        assert engine.lane.store.pool.num_free == 64


@pytest.mark.parametrize("grammar", [None, "start: /[a-z]{20,30}/"])
def test_a_turns_text_comes_as_it_is_written(model: PreTrainedModel, grammar: str | None) -> None:
    async def listen(client: LaneClient) -> None:
        talk, pieces = session(client), list[str]()
        loop_thread, early = threading.get_ident(), list[int]()

        def hear(text: str) -> None:
            assert threading.get_ident() == loop_thread and text
            early.append(client.lane.num_steps)
            pieces.append(text)

        talk.append(prompt(20))
        params = SamplingParams(max_new_tokens=60)
        made = await talk.generate(params, grammar, hear)
        assert "".join(pieces) == made.text
        assert min(early) < client.lane.num_steps, "the first text came before the last step"
        talk.close()
        again = session(client)
        again.append(prompt(20))
        assert await again.generate(params, grammar) == replace(made, cached_tokens=0, prefill_tokens=20)
        again.close()

    with running_client(tiny.tiny_engine(model)) as client:
        run(listen(client))


@pytest.mark.parametrize("eos_ids", [frozenset(), TOKENIZER.eos_ids])
def test_an_end_token_is_text_only_where_others_follow_it(model: PreTrainedModel, eos_ids: frozenset[int]) -> None:
    async def listen(client: LaneClient) -> None:
        talk, pieces = session(client), list[str]()
        talk.append(prompt(20))
        params = SamplingParams(max_new_tokens=6, logit_bias={END: 1000.0})
        made = await talk.generate(params, on_text=pieces.append)
        assert made.text == TOKENIZER.decode([END] * 5) if not eos_ids else made.text == ""
        assert "".join(pieces) == made.text
        talk.close()

    with running_client(tiny.tiny_engine(model, eos_ids=eos_ids)) as client:
        run(listen(client))


def test_a_listener_whose_loop_is_gone_harms_no_row(model: PreTrainedModel) -> None:
    async def listener() -> TextStream:
        return TextStream(TOKENIZER, lambda text: None)

    engine = tiny.tiny_engine(model)
    rows = [Row(RowKind.DRIVER, prompt(30), GREEDY, on_tokens=run(listener()).post), Row(RowKind.DRIVER, [5], GREEDY)]
    engine.run(rows)
    assert [row.future.result(0).new_token_ids for row in rows] == [
        fresh_tokens(model, ids) for ids in (prompt(30), [5])
    ]
