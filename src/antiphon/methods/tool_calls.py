"""Native tool calls in a driver's turn, read as the text arrives: thought, text, calls, and calls that are broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.methods.json_scan import MAX_CHARS, ObjectScanner, decode_object, find_objects

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_FALLBACK_CHARS = 4 * MAX_CHARS

_TEXT_MARKS = re.compile(f"{CALL_OPEN}|{THINK_OPEN}")


@dataclass(frozen=True)
class ToolCall:
    """A complete call of a declared tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class BrokenCall:
    """Something meant as a call that cannot be made; `reason` is for the model. Incomplete: the text ended in it."""

    reason: str
    incomplete: bool = False


@dataclass(frozen=True)
class Text:
    """Text outside of thought and calls."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text between `<think>` and `</think>`: never searched for calls or answers."""

    text: str


CallEvent = ToolCall | BrokenCall | Text | Thought


class ToolCallParser:
    """Reads one turn in pieces of any size; the events joined are the same whatever the pieces. Linear time.

    Native calls (`<tool_call>` JSON `</tool_call>`) come out as soon as they are complete. Where a turn has none, its
    text is searched at the end for what some models write instead: a call as a fenced, tagged or bare JSON object,
    taken only if it names a tool in `tools`. `in_thinking` says that the prompt ended inside a thought.
    """

    def __init__(self, tools: Collection[str], *, in_thinking: bool = False) -> None:
        self._tools = frozenset(tools)
        self._buffer = ""
        self._position = 0
        self._events: list[CallEvent] = []
        self._step: Callable[[], bool] = self._read_thought if in_thinking else self._read_text
        self._scanner = ObjectScanner()
        self._call_parts: list[str] = []
        self._saw_native = False
        self._plain: list[str] = []
        self._num_plain_chars = 0

    def push(self, text: str) -> list[CallEvent]:
        """Read more text; returns what it completed."""
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        while self._step():
            pass
        return self._take_events()

    def finish(self) -> list[CallEvent]:
        """The turn ended: returns what was held back, half a call as an incomplete `BrokenCall`, and fallback calls."""
        rest, self._buffer = self._buffer[self._position :], ""
        self._position = 0
        if self._step == self._read_thought:
            self._emit_thought(rest)
        elif self._step == self._read_text:
            self._emit_text(rest)
        elif self._step in (self._read_call_start, self._read_call):
            self._events.append(BrokenCall("the call is cut off", incomplete=True))
        if not self._saw_native:
            self._events += self._fallback_calls()
        return self._take_events()

    def _take_events(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events

    # Each step reads from `_position` in one state, and says whether another step can follow without more text.

    def _read_thought(self) -> bool:
        end = self._buffer.find(THINK_CLOSE, self._position)
        stop = end if end >= 0 else _held_back(self._buffer, self._position, (THINK_CLOSE,))
        self._emit_thought(self._buffer[self._position : stop])
        self._position = stop
        if end >= 0:
            self._position += len(THINK_CLOSE)
            self._step = self._read_text
        return end >= 0

    def _read_text(self) -> bool:
        mark = _TEXT_MARKS.search(self._buffer, self._position)
        stop = mark.start() if mark else _held_back(self._buffer, self._position, (CALL_OPEN, THINK_OPEN))
        self._emit_text(self._buffer[self._position : stop])
        self._position = mark.end() if mark else stop
        if mark and mark.group() == THINK_OPEN:
            self._step = self._read_thought
        elif mark:
            self._saw_native = True
            self._step = self._read_call_start
        return mark is not None

    def _read_call_start(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[self._position] == "{":
            self._scanner, self._call_parts = ObjectScanner(), []
            self._step = self._read_call
        else:
            self._events.append(BrokenCall("the call is not a JSON object"))
            self._step = self._skip_call
        return True

    def _read_call(self) -> bool:
        end = self._scanner.feed(self._buffer, self._position)
        stop = end if end >= 0 else len(self._buffer)
        self._call_parts.append(self._buffer[self._position : stop])
        self._position = stop
        if end < 0:
            return False
        raw = "".join(self._call_parts)
        if self._scanner.bad:
            # A closing tag where a brace is missing: small models lose count of braces, so count for them.
            repaired = raw.rstrip() + "}" * self._scanner.depth
            value = decode_object(repaired)
            self._events.append(self._call(value) if value else BrokenCall(self._scanner.bad))
            self._step = self._skip_call
        else:
            self._events.append(self._call(decode_object(raw)))
            self._step = self._read_call_end
        return True

    def _read_call_end(self) -> bool:
        if not self._skip_space():
            return False
        rest = self._buffer[self._position : self._position + len(CALL_CLOSE)]
        if len(rest) < len(CALL_CLOSE) and CALL_CLOSE.startswith(rest):
            return False
        if rest == CALL_CLOSE:
            self._position += len(CALL_CLOSE)
        self._step = self._read_text
        return True

    def _skip_call(self) -> bool:
        end = self._buffer.find(CALL_CLOSE, self._position)
        if end < 0:
            self._position = _held_back(self._buffer, self._position, (CALL_CLOSE,))
            return False
        self._position = end + len(CALL_CLOSE)
        self._step = self._read_text
        return True

    def _skip_space(self) -> bool:
        while self._position < len(self._buffer) and self._buffer[self._position].isspace():
            self._position += 1
        return self._position < len(self._buffer)

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        self._events.append(Text(text))
        kept = text[: MAX_FALLBACK_CHARS - self._num_plain_chars]
        self._plain.append(kept)
        self._num_plain_chars += len(kept)

    def _emit_thought(self, text: str) -> None:
        if text:
            self._events.append(Thought(text))

    def _call(self, value: Mapping[str, Any] | None) -> ToolCall | BrokenCall:
        if value is None:
            return BrokenCall("the call is not valid JSON")
        name = value.get("name")
        if not isinstance(name, str) or name not in self._tools:
            return BrokenCall(f"there is no tool named {str(name)[:80]}")
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = decode_object(arguments.strip())
        if not isinstance(arguments, dict):
            return BrokenCall("the call's arguments are not a JSON object")
        return ToolCall(name, arguments)

    def _fallback_calls(self) -> list[CallEvent]:
        objects = find_objects("".join(self._plain))
        return [self._call(value) for value in objects if any(value.get("name") == name for name in self._tools)]


def _held_back(buffer: str, start: int, marks: Collection[str]) -> int:
    """The index from which `buffer` may be the beginning of a mark; its end where it cannot."""
    longest = max(map(len, marks)) - 1
    for index in range(max(start, len(buffer) - longest), len(buffer)):
        if any(mark.startswith(buffer[index:]) for mark in marks):
            return index
    return len(buffer)
