"""The trace file: every step is there, spans of a row never overlap, and a file that was cut can be read."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from tiny_models import prompt
from transformers import PreTrainedModel

from antiphon.engine.errors import InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.row import Row, RowKind
from antiphon.scheduler.trace import Trace, read_trace, trace_lane, traced


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def spans_by_row(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
    return rows


def problems(events: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a trace: spans that have no end, go back in time, or cut each other on one row."""
    found = []
    for row, spans in spans_by_row(events).items():
        found += [f"{row}: ends before it begins" for span in spans if span["dur"] < 0]
        for before, after in pairwise(spans):
            if after["ts"] < before["ts"]:
                found.append(f"{row}: goes back in time")
            # Times are rounded to a thousandth of a microsecond.
            if after["ts"] + 0.002 < before["ts"] + before["dur"]:
                found.append(f"{row}: {before['name']} and {after['name']} overlap")
    return found + [f"{event['name']} is never closed" for event in events if event["ph"] in ("B", "E")]


def test_every_step_is_a_span_with_its_phase_rows_and_tokens(model: PreTrainedModel, tmp_path: Path) -> None:
    engine, path = tiny.tiny_engine(model), tmp_path / "trace.json"
    trace = Trace(path)
    trace_lane(trace, engine.lane)
    rows = [Row(RowKind.SUFFIX, prompt(length), SamplingParams(max_new_tokens=5)) for length in (30, 60, 90)]
    engine.run(rows)
    trace.close()
    events = read_trace(path)
    assert problems(events) == []
    spans = spans_by_row(events)["tiny"]
    assert len(spans) == engine.lane.num_steps
    assert {span["name"] for span in spans} == {"extend", "decode"}
    tokens = {name: sum(s["args"]["tokens"] for s in spans if s["name"] == name) for name in ("extend", "decode")}
    assert tokens == {"extend": 180, "decode": 3 * 4}
    assert max(span["args"]["rows"] for span in spans) == 3
    counts = [(event["name"], event["args"]["value"]) for event in events if event["ph"] == "C"]
    assert ("tiny live rows", 3) in counts
    assert counts[-2:] == [("tiny live rows", 0), ("tiny free pages", engine.lane.store.pool.num_free)]


def test_spans_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    clock = Clock()
    trace = Trace(tmp_path / "trace.json", clock=clock)
    with traced(trace, "queries", "long"):
        clock.seconds += 1
        with traced(trace, "queries", "short"):
            clock.seconds += 1
        clock.seconds += 1
    with traced(trace, "queries", "later"):
        clock.seconds += 1
    with pytest.raises(ZeroDivisionError), traced(trace, "queries", "failing"):
        raise ZeroDivisionError
    trace.close()
    events = read_trace(tmp_path / "trace.json")
    assert problems(events) == []
    named = {name: [span["name"] for span in spans] for name, spans in spans_by_row(events).items()}
    assert named == {"queries": ["short", "later", "failing"], "queries 2": ["long"]}
    [long] = spans_by_row(events)["queries 2"]
    assert (long["ts"], long["dur"]) == (0.0, 3e6)


def test_the_check_of_spans_can_fail() -> None:
    def span(start: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "tid": 1, "name": "step", "ts": start, "dur": duration}

    named = {"ph": "M", "tid": 1, "name": "thread_name", "args": {"name": "worker"}}
    assert problems([named, span(0, 5), span(5, 5)]) == []
    assert problems([named, span(0, 6), span(5, 5)]) == ["worker: step and step overlap"]
    assert problems([named, span(7, 1), span(5, 1)])[0] == "worker: goes back in time"
    assert problems([{"ph": "B", "name": "step"}]) == ["step is never closed"]


def test_a_file_that_was_cut_anywhere_can_be_read(tmp_path: Path) -> None:
    path, cut = tmp_path / "trace.json", tmp_path / "cut.json"
    trace = Trace(path)
    for number in range(20):
        with traced(trace, "worker", f"step “{number}”"):
            pass
    unclosed = read_trace(path)
    assert len(spans_by_row(unclosed)["worker"]) == 20, "all that ended is in the file at once"
    trace.close()
    trace.close()
    assert read_trace(path) == unclosed
    whole = path.read_bytes()
    for length in range(2, len(whole), 17):
        cut.write_bytes(whole[:length])
        events = read_trace(cut)
        assert events == unclosed[: len(events)]
        assert len(events) >= whole[:length].count(b"\n") - 1


def test_the_file_is_bounded_and_says_when_it_is_full(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", max_events=10)
    assert trace.problem is None
    for number in range(100):
        trace.counter("rows", number)
    trace.close()
    assert len(read_trace(tmp_path / "trace.json")) == 10
    assert trace.problem is not None and "is full" in trace.problem


def test_a_full_disk_ends_the_trace_and_not_the_steps(model: PreTrainedModel) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    engine = tiny.tiny_engine(model)
    trace = Trace(full)
    trace_lane(trace, engine.lane)
    row = Row(RowKind.SUFFIX, prompt(30), SamplingParams(max_new_tokens=5))
    engine.run([row])
    trace.close()
    assert len(row.future.result(0).new_token_ids) == 5
    assert trace.problem is not None and "No space left" in trace.problem


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        Trace(tmp_path / "no" / "folder.json")


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")

    def write(name: str) -> None:
        for _ in range(200):
            with traced(trace, "fetch", name):
                pass

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    events = read_trace(tmp_path / "trace.json")
    assert sum(event["ph"] == "X" for event in events) == 800
    assert problems(events) == []
