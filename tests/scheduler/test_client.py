"""Rows from asyncio: failures and cancellations end every row of a call, and no prefix is left without an owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import tiny_models as tiny
from tiny_models import prompt, running_client
from transformers import PreTrainedModel

from antiphon.engine.errors import AbortedError, CapacityError, InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.row import FinishReason, Row, RowKind, RowResult

T = TypeVar("T")

GREEDY = SamplingParams(max_new_tokens=4)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def suffix_row(ids: list[int], params: SamplingParams = GREEDY) -> Row:
    return Row(RowKind.SUFFIX, list(ids), params)


async def until(client: LaneClient, num_steps: int) -> None:
    deadline = time.monotonic() + 20
    while client.lane.num_steps < num_steps:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_rows_come_back_in_their_order_and_are_reported_as_they_end(model: PreTrainedModel) -> None:
    with running_client(tiny.tiny_engine(model)) as client:
        reported: list[int] = []
        lengths = [9, 1, 4]
        rows = [suffix_row(prompt(5), SamplingParams(max_new_tokens=length)) for length in lengths]
        results = run(client.run_rows(rows, lambda index, result: reported.append(index)))
    assert [len(result.new_token_ids) for result in results] == lengths
    assert reported == [1, 2, 0]


def test_no_rows_are_no_results(model: PreTrainedModel) -> None:
    with running_client(tiny.tiny_engine(model)) as client:
        assert run(client.run_rows([])) == []
        assert run(client.read_prefixes([])) == []


def test_one_failure_ends_all_rows_of_the_call_and_none_of_another(model: PreTrainedModel) -> None:
    async def both(client: LaneClient) -> list[RowResult | BaseException]:
        rows = [suffix_row(prompt(5), SamplingParams(max_new_tokens=2000)), suffix_row([10**6])]
        other = [suffix_row(prompt(6))]
        outcomes = await asyncio.gather(client.run_rows(rows), client.run_rows(other), return_exceptions=True)
        assert isinstance(rows[0].future.exception(0), AbortedError)
        return [outcomes[0], outcomes[1][0]]  # type: ignore[list-item,index]

    with running_client(tiny.tiny_engine(model)) as client:
        failure, result = run(both(client))
    assert isinstance(failure, InputError)
    assert isinstance(result, RowResult) and len(result.new_token_ids) == 4


def test_after_a_cancelled_wait_every_row_has_ended(model: PreTrainedModel) -> None:
    async def cancelled(client: LaneClient) -> list[Row]:
        rows = [suffix_row(prompt(5, seed), SamplingParams(max_new_tokens=1500)) for seed in range(2)]
        task = asyncio.create_task(client.run_rows(rows))
        await until(client, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(isinstance(row.future.exception(0), AbortedError) for row in rows)
        return rows

    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        run(cancelled(client))
        assert engine.lane.store.pool.num_free == 64


def test_calls_on_a_closed_engine_fail_and_do_not_hang(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        pass
    for attempt in (
        client.run_rows([suffix_row(prompt(5))]),
        client.read_prefix(prompt(5)),
        client.call(lambda: 1),
    ):
        with pytest.raises(AbortedError, match="the engine is closed"):
            run(attempt)


def test_closing_the_engine_ends_a_wait(model: PreTrainedModel) -> None:
    async def closed(client: LaneClient) -> None:
        task = asyncio.create_task(client.run_rows([suffix_row(prompt(5), SamplingParams(max_new_tokens=3000))]))
        await until(client, 2)
        await asyncio.to_thread(client.core.close)
        with pytest.raises(AbortedError):
            await task

    engine = tiny.tiny_engine(model)
    engine.core.start()
    run(closed(LaneClient(engine.core, engine.lane, None)))  # type: ignore[arg-type]


def test_a_prefix_is_read_once_and_found_from_then_on(model: PreTrainedModel) -> None:
    """Behind a parent that ends in the middle of a page: its full page is shared, the partial one copied."""
    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        parent = run(client.read_prefix(prompt(70))).prefix
        assert parent is not None
        texts = [prompt(64, seed=1), prompt(1, seed=2), prompt(130, seed=3)]
        first = run(client.read_prefixes(texts, parent))
        assert [(result.prefill_tokens, result.cached_tokens) for result in first] == [(64, 70), (1, 70), (130, 70)]
        assert [result.finish_reason for result in first] == [FinishReason.READ] * 3
        done: list[int] = []
        again = run(client.read_prefixes([*texts, prompt(2)], parent, on_done=lambda index, _: done.append(index)))
        costs = [(result.prefill_tokens, result.cached_tokens) for result in again]
        assert costs == [(0, 134), (0, 71), (0, 200), (2, 70)]
        assert sorted(done) == [0, 1, 2, 3]
        assert [result.prefix for result in again[:3]] == [result.prefix for result in first]
        client.release([parent, *(result.prefix for result in (*first, *again) if result.prefix is not None)])
        run(client.call(engine.core.check_integrity))
        assert engine.lane.store.pool.num_free == 64


def test_the_same_text_twice_in_one_call_is_two_uses_of_one_prefix(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        first, second = run(client.read_prefixes([prompt(65), prompt(65)]))
        assert first.prefix is second.prefix is not None
        client.release([first.prefix])
        run(client.call(engine.core.check_integrity))
        assert engine.lane.store.pool.num_free == 62
        client.release([first.prefix])
        run(client.call(engine.core.check_integrity))
        assert engine.lane.store.pool.num_free == 64


def test_a_failed_reading_gives_up_what_it_had_read_and_found(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model, num_pages=6)
    with running_client(engine) as client:
        kept = run(client.read_prefix(prompt(60))).prefix
        assert kept is not None
        with pytest.raises(CapacityError):
            run(client.read_prefixes([prompt(60), prompt(100, seed=1), prompt(600)]))
        run(client.call(lambda: None))
        assert engine.lane.store.pool.num_free == 5
        client.release([kept])
        run(client.call(lambda: None))
        assert engine.lane.store.pool.num_free == 6


@pytest.mark.parametrize("num_steps", range(4))
def test_a_cancelled_reading_gives_up_what_it_had_read_and_found(model: PreTrainedModel, num_steps: int) -> None:
    async def cancelled(client: LaneClient) -> None:
        start = client.lane.num_steps
        task = asyncio.create_task(client.read_prefixes([prompt(60, seed) for seed in range(5)]))
        await until(client, start + num_steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.call(lambda: None)
        await client.call(lambda: None)

    engine = tiny.tiny_engine(model, step_tokens=30)
    with running_client(engine) as client:
        kept = run(client.read_prefix(prompt(60))).prefix
        assert kept is not None
        run(cancelled(client))
        client.release([kept])
        run(client.call(lambda: None))
        assert engine.lane.store.pool.num_free == 64
