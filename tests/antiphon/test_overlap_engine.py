"""Overlap in the real engine, on a tiny model: the same answer, the order of work in the trace, and no page lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from antiphon import Document, Engine, EngineOptions, ParSer, ParSerOptions
from antiphon.cli.app import main
from antiphon.corpus import Corpus
from antiphon.engine.errors import InputError
from antiphon.events import Event, ReadProgress, RoundStarted
from antiphon.results import Answer
from antiphon.scheduler.trace import read_trace

TEXT = "\n\n".join(f"Paragraph {number}: the keeper of light {number} was called Ada {number}." for number in range(40))


def engine_options(model: Path, **changes: Any) -> EngineOptions:
    values = {"worker": str(model), "driver": str(model), "memory_bytes": 400 << 20, "dtype": "float32"}
    return EngineOptions(**{**values, **changes}, debug=True)


def parser_options(**changes: Any) -> ParSerOptions:
    """One turn of two queries, as the grammar has it, then the forced answer."""
    values = {"rounds": 1, "shard_tokens": 300, "worker_max_new_tokens": 8, "driver_max_new_tokens": 900}
    return ParSerOptions(**{**values, **changes})


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


async def check_nothing_left(engine: Engine) -> None:
    lane = engine.worker.client.lane
    await engine.worker.client.call(lane.store.clear_cached)
    await engine.worker.client.call(engine.worker.client.core.check_integrity)
    assert lane.store.pool.num_free == lane.store.pool.num_pages


def spans(path: Path, track: str) -> list[dict[str, Any]]:
    events = read_trace(path)
    tids = {event["tid"] for event in events if event["name"] == "thread_name" and event["args"]["name"] == track}
    return [event for event in events if event["ph"] == "X" and event["tid"] in tids]


def end(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"])


def test_the_answer_is_the_same_and_the_trace_shows_what_ran_beside_what(tiny_model: Path, tmp_path: Path) -> None:
    async def asked(overlap: bool) -> Answer:
        options = engine_options(tiny_model, trace=tmp_path / f"{overlap}.json")
        async with Engine(options) as engine:
            parser = ParSer(engine, parser_options(overlap=overlap))
            answer = await parser.ask(Document.from_text(TEXT), "Who kept light 3?")
            await check_nothing_left(engine)
        return answer

    answers = [run(asked(overlap)) for overlap in (True, False)]
    assert answers[0].rounds, "the driver asked, or this shows nothing"
    kept = [(a.answer, a.stopped, a.evidence, a.usage, [(r.queries, r.relevance) for r in a.rounds]) for a in answers]
    assert kept[0] == kept[1]
    reading, turn = (spans(tmp_path / "True.json", track)[0] for track in ("reading", "turns"))
    assert turn["ts"] < end(reading), "the driver's first turn begins while shards are read"
    reading, turn = (spans(tmp_path / "False.json", track)[0] for track in ("reading", "turns"))
    assert turn["ts"] >= end(reading)
    steps = spans(tmp_path / "True.json", "worker")
    assert {step["name"] for step in steps} == {"read", "extend", "decode"}
    assert len(spans(tmp_path / "True.json", "rounds")) == 1


def test_a_reading_that_is_cut_at_any_point_leaves_no_page(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(engine_options(tiny_model, step_tokens=128)) as engine:
            for num_shards in (0, 1, 4, 7):
                events: list[Event] = []
                parser = ParSer(engine, parser_options())
                asking = parser.ask(Document.from_text(f"{num_shards}" + TEXT), "Who kept light 3?", events.append)
                task = asyncio.create_task(asking)
                while sum(isinstance(event, ReadProgress) for event in events) < num_shards:
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await check_nothing_left(engine)

    run(work())


@pytest.mark.parametrize("fails", ["turn", "scatter"])
def test_a_failure_beside_other_work_ends_it_all_and_leaves_no_page(
    tiny_model: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's row fails while shards are read; a scatter of the first query fails while the driver writes on."""

    async def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"the {fails} failed")

    async def work() -> None:
        async with Engine(engine_options(tiny_model)) as engine:
            session = engine.session("driver")
            if fails == "turn":
                monkeypatch.setattr(type(session), "generate", failing)
            else:
                monkeypatch.setattr(Corpus, "scatter", failing)
            session.close()
            with pytest.raises(RuntimeError, match=f"the {fails} failed"):
                await ParSer(engine, parser_options()).ask(Document.from_text(TEXT), "Who kept light 3?")
            await check_nothing_left(engine)

    run(work())


def test_a_document_that_cannot_be_read_ends_the_turn_beside_it(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(engine_options(tiny_model)) as engine:
            parser = ParSer(engine, parser_options(shard_tokens=16_300))
            with pytest.raises(InputError, match="Lower --shard-tokens"):
                await parser.ask(Document.from_text(TEXT), "Who kept light 3?")
            await check_nothing_left(engine)

    run(work())


def test_the_command_line_writes_the_trace(tiny_model: Path, tmp_path: Path) -> None:
    book, path = tmp_path / "book.txt", tmp_path / "trace.json"
    book.write_text(TEXT)
    models = ["--worker", str(tiny_model), "--driver", str(tiny_model), "--memory", "1GiB"]
    small = ["--rounds", "1", "--shard-tokens", "300", "--max-new-tokens", "8", "--quiet", "--no-overlap"]
    assert main(["ask", str(book), "Who?", *models, *small, "--trace", str(path)]) in (0, 1)
    assert spans(path, "reading") and spans(path, "worker")
    assert main(["ask", str(book), "Who?", *models, *small, "--trace", str(tmp_path / "no" / "file")]) == 2


def test_events_of_a_round_come_after_the_corpus_is_read(tiny_model: Path) -> None:
    async def work() -> None:
        events: list[Event] = []
        async with Engine(engine_options(tiny_model)) as engine:
            await ParSer(engine, parser_options()).ask(Document.from_text(TEXT), "Who kept light 3?", events.append)
        started = next(index for index, event in enumerate(events) if isinstance(event, RoundStarted))
        assert not any(isinstance(event, ReadProgress) for event in events[started:])

    run(work())
