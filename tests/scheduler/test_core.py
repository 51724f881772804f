"""The core's thread: everything that is handed in comes to an end, also while it closes, and after a fault."""

from __future__ import annotations

import threading
import time

import pytest
import tiny_models as tiny
from tiny_models import TinyEngine, prompt
from transformers import PreTrainedModel

from antiphon.engine.errors import AbortedError, AntiphonError
from antiphon.engine.prefix_store import Keep
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.core import Core
from antiphon.scheduler.row import Row, RowKind

LONG = SamplingParams(max_new_tokens=2000)


def long_rows(count: int) -> list[Row]:
    return [Row(RowKind.SUFFIX, prompt(5, seed), LONG) for seed in range(count)]


def submit(engine: TinyEngine, rows: list[Row]) -> None:
    for row in rows:
        engine.core.call(lambda row=row: engine.lane.submit(row)).result(20)


def wait_for_steps(engine: TinyEngine, count: int) -> None:
    deadline = time.monotonic() + 20
    while engine.lane.num_steps < count:
        assert time.monotonic() < deadline, "the core does not step"
        time.sleep(0.001)


def test_calls_run_on_the_core_s_thread_and_give_their_value_or_exception(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    engine.core.start()
    assert engine.core.call(lambda: threading.current_thread().name).result(20) == "antiphon-core"
    with pytest.raises(ZeroDivisionError):
        engine.core.call(lambda: 1 // 0).result(20)
    assert engine.core.call(lambda: 5).result(20) == 5
    engine.core.close()


def test_closing_while_rows_run_ends_every_row_and_frees_every_page(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model, num_pages=100)
    engine.core.start()
    rows = [*long_rows(2), Row(RowKind.SUFFIX, prompt(7), LONG, gate=lambda row, logits: None), *long_rows(3)[2:]]
    submit(engine, rows)
    wait_for_steps(engine, 3)
    engine.core.close()
    for row in rows:
        with pytest.raises(AbortedError, match="the engine is closed"):
            row.future.result(0)
    engine.core.check_integrity()
    assert engine.lane.store.pool.num_free == 100


def test_calls_after_a_close_fail_and_a_second_close_does_nothing(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    engine.core.start()
    engine.core.close()
    with pytest.raises(AbortedError, match="the engine is closed"):
        engine.core.call(lambda: 5).result(0)
    engine.core.close()


def test_a_core_that_never_started_can_be_closed(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    rows = long_rows(1)
    engine.lane.submit(rows[0])
    engine.core.close()
    assert isinstance(rows[0].future.exception(0), AbortedError)


def test_rows_handed_in_behind_a_close_end_too(model: PreTrainedModel) -> None:
    """The close is in the queue, and before the thread takes it a row is put behind it."""
    engine = tiny.tiny_engine(model)
    rows = long_rows(2)
    blocked = threading.Event()
    engine.core.start()
    engine.core.call(lambda: blocked.wait(20))
    closing = threading.Thread(target=engine.core.close)
    closing.start()
    time.sleep(0.05)
    futures = [engine.core.call(lambda row=row: engine.lane.submit(row)) for row in rows]
    blocked.set()
    closing.join(20)
    assert [future.done() for future in futures] == [True, True]
    assert all(isinstance(row.future.exception(0), AbortedError) for row in rows)
    engine.core.check_integrity()


def test_no_call_is_lost_while_the_core_closes(model: PreTrainedModel) -> None:
    for _ in range(20):
        core = Core({})
        core.start()
        futures = []
        closing = threading.Thread(target=core.close)
        closing.start()
        while closing.is_alive():
            futures.append(core.call(lambda: None))
        closing.join()
        futures.append(core.call(lambda: None))
        assert all(future.done() for future in futures)


def test_a_fault_of_the_engine_s_own_ends_every_row_with_its_cause(model: PreTrainedModel) -> None:
    """A page is lost: the check on idling finds it, and nobody waits for a thread that is gone."""
    engine = tiny.tiny_engine(model)
    engine.core.start()
    held = Row(RowKind.SUFFIX, prompt(5), LONG, gate=lambda row, logits: None)
    submit(engine, [held])
    wait_for_steps(engine, 1)
    engine.core.call(lambda: engine.lane.store.allocate(1)).result(20)
    with pytest.raises(AbortedError, match=r"the engine is closed: kv pages: page \d+ has 1 owners"):
        held.future.result(20)
    with pytest.raises(AbortedError, match="kv pages"):
        engine.core.call(lambda: 5).result(20)
    engine.core.close()


def test_every_row_ends_even_where_pages_cannot_be_given_back(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    rows = long_rows(3)
    for row in rows:
        engine.lane.submit(row)
    engine.lane.step()
    engine.lane.store.pool.release(rows[0].pages)
    engine.core.close()
    assert all(isinstance(row.future.exception(0), AbortedError) for row in rows)


def test_a_busy_lane_lets_another_step(model: PreTrainedModel) -> None:
    """Two models in one process: a driver that writes 100 tokens does not stop the worker."""
    driver, worker = tiny.tiny_engine(model), tiny.tiny_engine(tiny.random_hf_model("qwen2"))
    core = Core({"worker": worker.lane, "driver": driver.lane})
    driver.lane.submit(Row(RowKind.DRIVER, prompt(5), SamplingParams(max_new_tokens=100)))
    reading = Row(RowKind.READ, prompt(30), SamplingParams(max_new_tokens=0), keep=Keep.PINNED)
    worker.lane.submit(reading)
    for _ in range(10):
        core._step()
    assert reading.future.done()
    assert driver.lane.num_steps == 9
    core.run_until_idle()


def test_integrity_is_checked_on_idling(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)
    engine.lane.store.allocate(1)
    with pytest.raises(AntiphonError, match="owners on the books"):
        engine.core.run_until_idle()
