"""Promises of the tool-call parser: chunking changes nothing, arguments may hold anything, nothing hangs."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.methods.json_scan import MAX_CHARS, MAX_DEPTH, decode_object
from antiphon.methods.tool_calls import BrokenCall, CallEvent, Text, Thought, ToolCall, ToolCallParser

TOOLS = ("query_agents",)


def call(query: str) -> str:
    arguments = {"name": "query_agents", "arguments": {"query": query}}
    return f"<tool_call>\n{json.dumps(arguments, ensure_ascii=False)}\n</tool_call>"


def parse(*pieces: str, in_thinking: bool = False) -> list[CallEvent]:
    parser = ToolCallParser(TOOLS, in_thinking=in_thinking)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish())


def joined(events: list[CallEvent]) -> list[CallEvent]:
    result: list[CallEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + event.text)
        else:
            result.append(event)
    return result


def queries(events: list[CallEvent]) -> list[str]:
    return [event.arguments["query"] for event in events if isinstance(event, ToolCall)]


def test_several_calls_and_the_text_around_them_come_out_in_order() -> None:
    events = parse(f"Let me look.\n{call('Who?')}\n{call('Where?')}")
    assert events == [
        Text("Let me look.\n"),
        ToolCall("query_agents", {"query": "Who?"}),
        Text("\n"),
        ToolCall("query_agents", {"query": "Where?"}),
    ]


@pytest.mark.parametrize(
    "query", ['a </tool_call> b "<tool_call>" }{', "x</answer><think>", 'back\\slash "q"', "日本 🎻"]
)
def test_a_closing_tag_or_brace_inside_an_argument_does_not_cut_the_call(query: str) -> None:
    assert parse(call(query)) == [ToolCall("query_agents", {"query": query})]


def test_a_call_is_reported_as_soon_as_its_object_closes() -> None:
    parser = ToolCallParser(TOOLS)
    text = call("Who?")
    end = text.index("\n</tool_call>")
    assert parser.push(text[: end - 1]) == []
    assert parser.push(text[end - 1 : end]) == [ToolCall("query_agents", {"query": "Who?"})]


PIECES = st.sampled_from(
    [
        call("a </tool_call> b"),
        call("c"),
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"',
        "<think>",
        "</think>",
        "\\",
        "<",
        "text ",
        "\n",
        '{"name": "query_agents", "arguments": {"query": "d"}}',
        "<tool_call>{[<",
        "<tool_call>no",
        "<tool",
    ]
)


@settings(deadline=None, max_examples=150)
@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_chunking_gives_the_same_events(text: str, cuts: list[int], in_thinking: bool) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    whole = parse(text, in_thinking=in_thinking)
    assert parse(*pieces, in_thinking=in_thinking) == whole
    assert parse(*text, in_thinking=in_thinking) == whole


@pytest.mark.parametrize("cut", [12, 20, 40, 60])
def test_half_a_call_at_the_end_is_incomplete_and_never_a_call(cut: int) -> None:
    events = parse(call("What is the name of the ship?")[:cut])
    assert [type(event) for event in events] == [BrokenCall]
    assert isinstance(events[0], BrokenCall) and events[0].incomplete


def test_string_arguments_are_decoded_to_a_mapping() -> None:
    raw = json.dumps({"name": "query_agents", "arguments": json.dumps({"query": "Who?"})})
    assert queries(parse(f"<tool_call>{raw}</tool_call>")) == ["Who?"]


def test_a_missing_last_brace_is_counted_for_the_model() -> None:
    events = parse('<tool_call>\n{"name": "query_agents", "arguments": {"query": "Who?"}\n</tool_call> then')
    assert events == [ToolCall("query_agents", {"query": "Who?"}), Text(" then")]


@pytest.mark.parametrize(
    "body",
    [
        "query_agents(Who?)",
        '{"name": "rm", "arguments": {"query": "x"}}',
        '{"name": "query_agents", "arguments": [1]}',
        '{"name": ["query_agents"], "arguments": {}}',
        '{"name" "query_agents"}',
        '{"a": ' + "[" * 5000 + "}",
        "<x>",
    ],
)
def test_a_broken_call_is_reported_and_the_next_one_still_read(body: str) -> None:
    events = parse(f"<tool_call>\n{body}\n</tool_call>\n{call('Who?')}")
    assert isinstance(events[0], BrokenCall) and not events[0].incomplete
    assert queries(events) == ["Who?"]


BARE = '{"name": "query_agents", "arguments": {"query": "Who?"}}'


@pytest.mark.parametrize(
    "text",
    [
        BARE,
        f"```json\n{BARE}\n```",
        f"Sure!\n```\n{BARE}\n```\nDone.",
        f"<tools>\n{BARE}\n</tools>",
        f"[{BARE}]",
        BARE.replace("arguments", "parameters"),
    ],
)
def test_fenced_tagged_and_bare_calls_count_when_they_name_a_declared_tool(text: str) -> None:
    assert queries(parse(text)) == ["Who?"]
    assert queries(parse(text.replace("query_agents", "other_tool"))) == []


def test_a_bare_object_beside_a_native_call_is_text() -> None:
    assert queries(parse(f"{BARE}\n{call('Where?')}")) == ["Where?"]


def test_calls_in_thought_are_not_made() -> None:
    assert queries(parse(f"<think>{call('a')}</think>{call('b')}")) == ["b"]
    assert queries(parse(f"{call('a')}\n</think>\n\n{call('b')}", in_thinking=True)) == ["b"]
    assert parse(f"I could {call('a')}", in_thinking=True) == [Thought(f"I could {call('a')}")]


@pytest.mark.parametrize(
    "text", ["<tool_call>" * 20_000, "{" * 200_000, '<tool_call>{"a":"' + "\\" * 200_000, "<tool_call>{<" * 20_000]
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    started = time.process_time()
    for size in (len(text), 7):
        parser = ToolCallParser(TOOLS)
        for index in range(0, len(text), size):
            parser.push(text[index : index + size])
        parser.finish()
    assert time.process_time() - started < 6


def test_depth_and_size_of_an_object_are_bounded() -> None:
    inside = MAX_DEPTH - 1
    assert decode_object('{"a":' + "[" * inside + "]" * inside + "}") is not None
    assert decode_object('{"a":' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}") is None
    assert decode_object('{"a":"' + "x" * MAX_CHARS + '"}') is None
