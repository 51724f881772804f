"""Overlap changes when things happen, and nothing else: no answer, no event, and nothing is left of what was cut."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted import LINES, PROMPTS, TWO_HOPS, Book, Script, ask, call

from antiphon.document import Document, Source
from antiphon.engine.errors import CapacityError
from antiphon.events import Event
from antiphon.methods import ParSer, ParSerOptions, open_round
from antiphon.methods.findings import FindingReader
from antiphon.results import Answer, RoundRecord

TWO_QUERIES = [call("Who directed Blue Sand?", "Where was Ana Reyes born?"), "<answer>Chile</answer>"]
DOCUMENT = Document((Source("book.txt", "\n".join(LINES)),))


def logged(script: Script, **book: Any) -> list[str]:
    """The log that a script and its book write together."""
    script.book = Book(log=script.log, **book)
    return script.log


async def ask_document(script: Script, **options: Any) -> Answer:
    parser = ParSer(script, ParSerOptions(**options), prompts=PROMPTS)
    return await asyncio.wait_for(parser.ask(DOCUMENT, "Where was the director born?"), 10)


def test_the_document_is_read_while_the_driver_writes_its_first_turn() -> None:
    log = logged(script := Script(list(TWO_HOPS), streams=True), read_steps=20)
    answer = asyncio.run(ask_document(script))
    assert log[:4] == ["reading begins", "turn begins", "reading ends", "Who directed Blue Sand? begins"]
    assert (answer.answer, script.released, answer.usage.shards) == ("Chile", 2, 3)
    log = logged(script := Script(list(TWO_HOPS), streams=True), read_steps=20)
    assert asyncio.run(ask_document(script, overlap=False)).answer == "Chile"
    assert log[:3] == ["reading begins", "reading ends", "turn begins"]


def test_a_query_whose_call_is_complete_waits_for_the_reading_and_for_nothing_else() -> None:
    log = logged(script := Script(list(TWO_HOPS), streams=True), read_steps=10_000)
    assert asyncio.run(ask_document(script)).answer == "Chile"
    assert log[:5] == ["reading begins", "turn begins", "turn ends", "reading ends", "Who directed Blue Sand? begins"]


def test_a_query_is_scattered_while_the_driver_writes_the_next_one_and_both_are_one_round() -> None:
    log: list[str] = []
    script, book = Script(list(TWO_QUERIES), streams=True, log=log), Book(log=log)
    answer = ask(script, book)
    assert log[:6] == [
        "turn begins",
        "Who directed Blue Sand? begins",
        "Who directed Blue Sand? ends",
        "joins: Where was Ana Reyes born? begins",
        "joins: Where was Ana Reyes born? ends",
        "turn ends",
    ]
    [record] = answer.rounds
    assert record.queries == ("Who directed Blue Sand?", "Where was Ana Reyes born?")


def test_without_overlap_nothing_is_scattered_before_the_turn_ends() -> None:
    log: list[str] = []
    ask(Script(list(TWO_QUERIES), streams=True, log=log), Book(log=log), overlap=False)
    assert log[:2] == ["turn begins", "turn ends"]


def timeless(events: list[Event]) -> list[Any]:
    """Events without what a clock said, and the answer at their end."""
    untimed = [event for event in events if not hasattr(event, "answer")]
    return [
        {name: value for name, value in vars(event).items() if name != "seconds"} | {"kind": type(event)}
        for event in untimed
    ]


REPEATS = [
    call("Who directed Blue Sand?"),
    call("who directed  blue sand", "Where was Ana Reyes born?", "Where was Ana Reyes born?"),
    "<answer>Chile</answer>",
]
TOO_MANY = [call("Who directed Blue Sand?", "Who sang?", "Where was Ana Reyes born?"), "<answer>x</answer>"]
BROKEN = ["<tool_call>\nno JSON</tool_call>" + TWO_QUERIES[0], "<answer>Chile</answer>"]
BESIDE_AN_ANSWER = [TWO_QUERIES[0] + "<answer>Peru</answer>", "<answer>Chile</answer>"]
IN_A_FENCE = ['```json\n{"name": "query_agents", "arguments": {"query": "Who sang?"}}\n```', "<answer>x</answer>"]


def outcome(turns: list[str], *, overlap: bool) -> tuple[Any, ...]:
    """All that must not depend on overlap."""
    events: list[Event] = []
    script = Script(list(turns), streams=True)
    answer = ask(script, Book(scatter_steps=200), events, overlap=overlap, driver_grammar=False)
    records = [RoundRecord(r.queries, r.findings, r.abstentions, 0.0, r.relevance) for r in answer.rounds]
    kept = (answer.answer, answer.stopped, answer.evidence, answer.notes, answer.usage, records)
    return script.reads, timeless(events), kept


@pytest.mark.parametrize("turns", [TWO_HOPS, TWO_QUERIES, REPEATS, TOO_MANY, BROKEN, BESIDE_AN_ANSWER, IN_A_FENCE])
def test_the_driver_reads_the_same_and_the_answer_and_events_are_the_same(turns: list[str]) -> None:
    assert outcome(turns, overlap=True) == outcome(turns, overlap=False)


def test_rows_told_under_another_query_would_not_pass_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def misled(corpus: Any, queries: Any, number: int, on_event: Any, first_query: int) -> FindingReader:
        return FindingReader(corpus, queries, number, on_event)

    monkeypatch.setattr(open_round, "FindingReader", misled)
    assert outcome(TWO_QUERIES, overlap=True) != outcome(TWO_QUERIES, overlap=False)


def test_what_was_scattered_early_is_cancelled_where_the_turn_as_it_ended_does_not_ask_it() -> None:
    log: list[str] = []
    turns = ["<answer>Peru</answer>", *TWO_HOPS]
    script = Script(turns, streams=True, said=call("Who sang?") + " " * 50, log=log)
    book = Book(log=log, scatter_steps=10_000)
    assert ask(script, book, query_first=False).answer == "Peru"
    assert log == ["turn begins", "Who sang? begins", "turn ends", "Who sang? cancelled"]
    invalid = Script(["hm", *TWO_HOPS], streams=True, said=call("Who sang?") + " ")
    answer = ask(invalid, Book(), driver_grammar=False, overlap=True, max_repeats=0, rounds=1)
    assert answer.rounds == []


def test_a_turn_that_fails_cancels_the_reading_and_what_it_had_asked() -> None:
    log = logged(script := Script(list(TWO_HOPS), streams=True, fails_after=20), read_steps=10_000)
    with pytest.raises(RuntimeError, match="the driver failed"):
        asyncio.run(ask_document(script))
    assert log == ["reading begins", "turn begins", "reading cancelled"]
    assert (script.num_open, script.released) == (0, 0)
    log = logged(script := Script(list(TWO_QUERIES), streams=True, fails_after=150), scatter_steps=10_000)
    with pytest.raises(RuntimeError, match="the driver failed"):
        asyncio.run(ask_document(script))
    assert log[-1] == "Who directed Blue Sand? cancelled"
    assert (script.num_open, script.released) == (0, 2)


def test_a_reading_that_fails_cancels_the_turn_and_is_what_is_raised() -> None:
    log = logged(script := Script(list(TWO_HOPS), streams=True), read_steps=10, read_error=CapacityError("too large"))
    with pytest.raises(CapacityError, match="too large"):
        asyncio.run(ask_document(script))
    assert log == ["reading begins", "turn begins", "reading ends", "turn cancelled"]
    assert (script.num_open, script.released) == (0, 0)


@pytest.mark.parametrize("num_steps", range(0, 400, 13))
def test_a_question_cancelled_at_any_point_leaves_nothing(num_steps: int) -> None:
    async def cancelled(script: Script) -> None:
        task = asyncio.create_task(ask_document(script))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    log = logged(script := Script(list(TWO_QUERIES), streams=True), read_steps=40, scatter_steps=10_000)
    asyncio.run(cancelled(script))
    assert script.num_open == 0
    assert script.released == (2 if "reading ends" in log else 0)
    begun = [entry.removesuffix(" begins") for entry in log if entry.endswith(" begins")]
    assert all(f"{name} ends" in log or f"{name} cancelled" in log for name in begun)


def test_a_document_without_shards_ends_the_turn_too() -> None:
    log = logged(script := Script(list(TWO_HOPS), streams=True), read_steps=5, lines=())
    answer = asyncio.run(ask_document(script))
    assert (answer.stopped, script.num_open, script.released) == ("no-document", 0, 2)
    assert log[-1] == "turn cancelled"
    log = logged(script := Script(list(TWO_HOPS)), read_steps=10_000, lines=())
    assert asyncio.run(ask_document(script)).stopped == "no-document"
    assert log == ["reading begins", "turn begins", "turn ends", "reading ends"], "and no shard was asked"
    log = logged(script := Script(list(TWO_HOPS)), lines=())
    assert asyncio.run(ask_document(script, overlap=False)).stopped == "no-document"
    assert (log, script.released) == (["reading begins", "reading ends"], 2)


def test_an_answer_that_comes_before_the_document_is_read_waits_so_that_what_was_read_is_the_same() -> None:
    log = logged(script := Script(["<answer>Peru</answer>"], streams=True), read_steps=1000)
    answer = asyncio.run(ask_document(script, query_first=False))
    assert (answer.answer, answer.stopped, script.num_open, script.released) == ("Peru", "answered", 0, 2)
    assert log == ["reading begins", "turn begins", "turn ends", "reading ends"]
    assert (answer.usage.shards, answer.usage.worker_prefill_tokens) == (3, 60)
    log = logged(script := Script(["<answer>Peru</answer>"], streams=True), read_steps=1000, lines=())
    answer = asyncio.run(ask_document(script, query_first=False))
    assert (answer.answer, answer.stopped, answer.notes) == ("not found in the document", "no-document", [])


def test_a_scatter_that_fails_fails_the_question_and_ends_the_others() -> None:
    class Failing(Book):
        async def scatter(self, queries: Any, options: Any, on_row: Any, *, joins: bool = False) -> Any:
            if not joins:
                raise CapacityError("no room for a row")
            return await super().scatter(queries, options, on_row, joins=joins)

    log: list[str] = []
    script = Script(list(TWO_QUERIES), streams=True, log=log)
    with pytest.raises(CapacityError, match="no room"):
        ask(script, Failing(log=log, scatter_steps=10_000))
    assert log[-1] == "joins: Where was Ana Reyes born? cancelled"


def test_a_rounds_seconds_are_from_its_first_scatter_to_its_last_reply() -> None:
    answer = ask(Script(list(TWO_QUERIES), streams=True), Book())
    # Each of the two scatters says that it took half a second; they began milliseconds apart.
    assert 0.5 < answer.rounds[0].seconds < 0.9
