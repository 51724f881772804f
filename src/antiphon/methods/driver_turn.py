"""What a driver's turn means: queries, an answer, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.methods.json_scan import printable
from antiphon.methods.prompts import QUERY_TOOL
from antiphon.methods.tool_calls import BrokenCall, CallEvent, Text, ToolCall, ToolCallParser

ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
MAX_QUERY_CHARS = 2000


@dataclass(frozen=True)
class Queries:
    """The turn asks; in the order written, as written apart from space at the ends."""

    queries: tuple[str, ...]


@dataclass(frozen=True)
class FinalAnswer:
    """The turn answers."""

    text: str


@dataclass(frozen=True)
class Invalid:
    """The turn does neither; `reason` is for the model."""

    reason: str


def classify_turn(
    text: str, *, finish_reason: str = "stop", in_thinking: bool = False
) -> Queries | FinalAnswer | Invalid:
    """Calls win over an answer in the same turn: an answer beside a question was written before its findings.

    A turn that ended by its length counts only for what is complete in it.
    """
    parser = ToolCallParser((QUERY_TOOL,), in_thinking=in_thinking)
    events = parser.push(text) + parser.finish()
    queries = _queries(events)
    if queries:
        return Queries(tuple(queries))
    if any(isinstance(event, ToolCall) for event in events):
        return Invalid(f"{QUERY_TOOL} needs a query of 1 to {MAX_QUERY_CHARS} characters")
    spoken = "".join(event.text for event in events if isinstance(event, Text))
    answer = extract_answer(spoken, complete=finish_reason == "stop")
    if answer:
        return FinalAnswer(answer)
    broken = next((event.reason for event in events if isinstance(event, BrokenCall)), None)
    if finish_reason == "length":
        return Invalid("the turn was too long and was cut off")
    return Invalid(broken or "there is neither a call nor an answer")


class QueryStream:
    """The queries of a turn that is still being written. What it gives is how the whole turn's queries begin, in any
    pieces: calls that are written in another way than natively count only when the turn has ended."""

    def __init__(self, *, in_thinking: bool = False) -> None:
        self._parser = ToolCallParser((QUERY_TOOL,), in_thinking=in_thinking)

    def push(self, text: str) -> list[str]:
        """Reads more text; returns the queries that it completed."""
        return _queries(self._parser.push(text))


def extract_answer(text: str, *, complete: bool = True) -> str:
    """The last `<answer>` in `text`, stripped; "" without one. `complete` lets a last one that was not closed count."""
    end = text.rfind(ANSWER_CLOSE)
    if end < 0:
        start = text.rfind(ANSWER_OPEN)
        return text[start + len(ANSWER_OPEN) :].strip() if complete and start >= 0 else ""
    start = text.rfind(ANSWER_OPEN, 0, end)
    return text[start + len(ANSWER_OPEN) : end].strip() if start >= 0 else ""


def spoken_text(text: str, *, in_thinking: bool = False) -> str:
    """A turn's text without thought and calls: what a forced last turn without tags comes down to."""
    parser = ToolCallParser((QUERY_TOOL,), in_thinking=in_thinking)
    events = parser.push(text) + parser.finish()
    return "".join(event.text for event in events if isinstance(event, Text)).strip()


def _queries(events: Iterable[CallEvent]) -> list[str]:
    return [query for event in events if isinstance(event, ToolCall) if (query := _query(event))]


def _query(call: ToolCall) -> str:
    query = call.arguments.get("query")
    text = printable(query).strip() if isinstance(query, str) else ""
    return text if len(text) <= MAX_QUERY_CHARS else ""
