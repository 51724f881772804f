"""Promises of the ParSer controller, with a scripted driver and corpus: who is asked what, and how a question ends."""

from __future__ import annotations

import asyncio

import pytest
from scripted import LINES, PROMPTS, TWO_HOPS, Book, Script, ask, call

from antiphon.document import Document, Source
from antiphon.engine.errors import AbortedError, CapacityError, InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.events import Answered, DriverTurn, Event, FindingFound, RoundFinished, RoundStarted, RowFinished
from antiphon.methods import ParSer, ParSerOptions
from antiphon.methods.backend import ScatterOptions
from antiphon.methods.driver_grammar import TurnKind, driver_grammar


def test_two_hops_are_asked_in_turn_and_answered_with_their_evidence() -> None:
    script, book = Script(list(TWO_HOPS)), Book()
    answer = ask(script, book)
    assert (answer.answer, answer.stopped, answer.method, answer.notes) == ("Chile", "answered", "parser", [])
    assert book.rounds == [("Who directed Blue Sand?",), ("Where was Ana Reyes born?",)]
    assert [(item.quote, item.line, item.round, item.verified) for item in answer.evidence] == [
        (LINES[0], 1, 1, True),
        (LINES[1], 2, 2, True),
    ]
    assert [(record.findings, record.abstentions, record.seconds) for record in answer.rounds] == [(1, 2, 0.5)] * 2


def test_the_driver_reads_each_thing_once_and_never_the_document() -> None:
    ask(script := Script(list(TWO_HOPS)))
    assert script.reads[0] == "[system]S[user]Where was the director born?[driver]"
    assert script.reads[1].startswith('[tool]Findings for "Who directed Blue Sand?" (1 from 3 shards):\n{"shard": 0, ')
    assert script.reads[1].endswith("}[driver]")
    assert "Ships are large" not in script.context


def test_tokens_and_seconds_are_summed_by_who_spent_them() -> None:
    answer = ask(script := Script(list(TWO_HOPS)))
    usage = answer.usage
    assert (usage.shards, usage.document_tokens) == (3, 42)
    assert (usage.worker_prefill_tokens, usage.worker_cached_tokens, usage.worker_decode_tokens) == (60, 180, 14)
    assert usage.driver_prefill_tokens == sum(map(len, script.reads))
    assert usage.driver_decode_tokens == sum(map(len, TWO_HOPS))
    assert usage.driver_cached_tokens > 0
    assert answer.seconds.rounds == 1.0
    assert answer.seconds.total >= answer.seconds.driver > 0


def test_queries_of_one_turn_are_one_round_with_a_result_each() -> None:
    script, book = Script([call("Who directed Blue Sand?", "Who sang?"), "<answer>x</answer>"]), Book()
    answer = ask(script, book)
    assert book.rounds == [("Who directed Blue Sand?", "Who sang?")]
    assert script.reads[1].count("[tool]") == 2
    assert 'No shard answers this query (3 shards were asked): "Who sang?"' in script.reads[1]
    assert (answer.rounds[0].findings, answer.rounds[0].abstentions) == (1, 5)


def test_a_query_asked_before_is_answered_from_what_was_found_then() -> None:
    again = call("who directed  Blue Sand", "Where was Ana Reyes born?", "Where was Ana Reyes born?")
    script, book = Script([call("Who directed Blue Sand?"), again, "<answer>Chile</answer>"]), Book()
    answer = ask(script, book, max_queries=3)
    assert book.rounds == [("Who directed Blue Sand?",), ("Where was Ana Reyes born?",)]
    results = script.reads[2].split("[tool]")[1:]
    assert [PROMPTS.repeated in result for result in results] == [True, False, True]
    assert '"answer": "Ana Reyes"' in results[0]
    assert len(answer.evidence) == 2


def test_a_driver_that_only_repeats_itself_is_made_to_answer() -> None:
    script, book = Script([call("Who sang?")] * 3 + ["<answer>x</answer>"]), Book()
    answer = ask(script, book, max_repeats=2)
    assert (answer.answer, answer.stopped, len(book.rounds)) == ("x", "turns", 1)
    assert "repeated" in answer.notes[0]


def test_calls_beyond_the_limit_of_a_turn_are_not_made_and_the_driver_is_told() -> None:
    script, book = Script([call("a?", "b?", "c?"), "<answer>x</answer>"]), Book()
    ask(script, book, max_queries=2, driver_grammar=False)
    assert book.rounds == [("a?", "b?")]
    assert script.reads[1].endswith("[tool]Only the first 2 calls of a turn are made.[driver]")


def test_an_invalid_action_gets_a_hint_as_a_tool_result_and_uses_up_a_turn() -> None:
    script = Script(["I would ask who directed it.", *TWO_HOPS])
    answer = ask(script, driver_grammar=False)
    assert answer.answer == "Chile"
    assert script.reads[1].startswith("[tool]Invalid action: there is neither a call nor an answer.")
    assert "[user]" not in script.reads[1]
    assert ask(Script(["hm", "hm", "<answer>Peru</answer>"]), rounds=2).stopped == "turns"


def test_a_turn_cut_by_its_length_without_a_call_is_invalid() -> None:
    script = Script(["I think <answer>Ch", "<answer>x</answer>"], finish_reason="length")
    ask(script, rounds=1, query_first=False)
    assert "Invalid action: the turn was too long" in script.reads[1]


def test_an_answer_before_any_round_is_refused_unless_the_papers_way_is_asked_for() -> None:
    script, book = Script(["<answer>Peru</answer>", *TWO_HOPS]), Book()
    assert ask(script, book).answer == "Chile"
    assert PROMPTS.ask_first in script.reads[1]
    early = ask(Script(["<answer>Peru</answer>"]), query_first=False)
    assert (early.answer, early.rounds) == ("Peru", [])
    assert any(note.startswith("ungrounded") for note in early.notes)


def test_each_turn_is_written_under_the_grammar_of_what_it_may_do() -> None:
    script = Script([call("Who directed Blue Sand?"), call("Who sang?"), "<answer>Ana</answer>"])
    ask(script, rounds=2, max_queries=3)
    kinds: list[TurnKind] = ["query", "query-or-answer", "answer"]
    assert script.grammars == [driver_grammar(kind, max_queries=3) for kind in kinds]
    ask(free := Script(list(TWO_HOPS)), driver_grammar=False)
    assert free.grammars == [None, None, None]


def test_when_turns_run_out_one_last_turn_must_answer_from_what_was_found() -> None:
    script = Script([call("Who directed Blue Sand?"), "  Ana Reyes\n"])
    answer = ask(script, rounds=1, driver_grammar=False)
    assert (answer.answer, answer.stopped) == ("Ana Reyes", "turns")
    assert '"answer": "Ana Reyes"' in script.reads[1]
    assert script.reads[1].endswith("[tool]LAST[driver]")
    assert ask(Script([call("Who sang?"), ""]), rounds=1).answer == "not found in the document"


def test_when_the_context_is_full_one_last_turn_must_answer() -> None:
    turns = [call(f"Who wrote song number {number}?") for number in range(40)]
    script = Script(turns, context_tokens=850, last="<answer>x</answer>")
    answer = ask(script, rounds=40)
    assert (answer.answer, answer.stopped) == ("x", "context")
    assert len(answer.rounds) > 1
    assert len(script.context) <= 850


@pytest.mark.parametrize("context_tokens", range(200, 900, 37))
def test_a_driver_never_gets_more_than_its_context_holds(context_tokens: int) -> None:
    queries = [f"Who directed Blue Sand?{' ' * number}" for number in range(12)]
    turns = [text for query in queries for text in (call(query), "nothing " * 99)]
    script = Script(turns, context_tokens=context_tokens, last="<answer>x</answer>" * 50)
    answer = ask(script, driver_grammar=False, driver_max_new_tokens=150, max_repeats=0)
    assert (answer.answer, answer.stopped in ("context", "turns")) == ("x", True)
    assert script.reads[-1].endswith("[tool]LAST[driver]")
    assert len(script.context) <= context_tokens


def test_a_question_that_the_context_cannot_hold_is_refused_with_both_sizes() -> None:
    with pytest.raises(CapacityError, match=r"need \d+ tokens of the driver's context, which has 100"):
        ask(Script([], context_tokens=100))
    with pytest.raises(CapacityError, match="which has 100"):
        ask(limited := Script([]), driver_context=100)
    assert limited.num_open == 0


def test_no_shards_have_a_defined_answer_and_no_question_is_refused() -> None:
    script = Script([])
    answer = ask(script, Book(lines=()))
    assert (answer.answer, answer.stopped, answer.evidence) == ("not found in the document", "no-document", [])
    assert script.reads == []
    with pytest.raises(InputError, match="question is empty"):
        asyncio.run(ParSer(script).ask(Book(), " \n"))


def test_an_abort_ends_the_question_and_closes_the_session() -> None:
    script = Script([call("Who?")], finish_reason="abort")
    with pytest.raises(AbortedError):
        ask(script)
    assert script.num_open == 0


def test_a_document_is_registered_for_its_question_and_released() -> None:
    script = Script(list(TWO_HOPS))
    document = Document((Source("book.txt", "x"),))
    answer = asyncio.run(ParSer(script, prompts=PROMPTS).ask(document, "Where was the director born?"))
    assert (answer.answer, script.released) == ("Chile", 2)
    failing = Script([])
    with pytest.raises(IndexError):
        asyncio.run(ParSer(failing, prompts=PROMPTS).ask(document, "Where?"))
    assert (failing.released, failing.num_open) == (2, 0)


def test_events_tell_the_whole_story_in_order() -> None:
    events: list[Event] = []
    answer = ask(Script(list(TWO_HOPS)), events=events)
    kinds = [type(event) for event in events if not isinstance(event, RowFinished)]
    hop = [DriverTurn, RoundStarted, FindingFound, RoundFinished]
    assert kinds == [*hop, *hop, DriverTurn, Answered]
    assert sum(isinstance(event, RowFinished) for event in events) == 6
    assert events[-1] == Answered(answer)


def test_a_thought_that_the_template_opened_is_not_taken_for_the_answer() -> None:
    thinking = ["It may be <answer>Peru</answer></think>\n" + call("Who sang?"), "hm </think><answer>Chile</answer>"]
    script = Script(thinking, opening="<think>\n")
    answer = ask(script, driver_thinking=True, driver_grammar=False)
    assert answer.answer == "Chile"
    assert all(flags == {"enable_thinking": True} for flags in script.chat.flags)


def test_the_rounds_options_are_the_methods() -> None:
    ask(
        Script(list(TWO_HOPS)),
        book := Book(),
        worker_temperature=0.7,
        seed=5,
        gate="both",
        readers=3,
        second_reader=True,
    )
    sampling = SamplingParams(max_new_tokens=512, temperature=0.7, seed=5)
    assert book.options[0] == ScatterOptions(sampling, "unknown-or-json", "both", 3, True)


TOO_LOW = ("rounds", "readers", "max_queries", "driver_max_new_tokens", "observation_tokens")


@pytest.mark.parametrize("name", [*TOO_LOW, "gate", "reply_grammar", "no_such_option"])
def test_options_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        ParSerOptions.from_mapping({name: -1 if name == "readers" else 0})
    assert ParSerOptions.from_mapping({"rounds": 3}).rounds == 3


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InputError, match="readers"):
        ParSerOptions(gate="likelihood", readers=0)
    with pytest.raises(InputError, match="shard-tokens"):
        ParSerOptions(shard_tokens=0)
    assert ParSerOptions(gate="likelihood", readers=3).readers == 3
