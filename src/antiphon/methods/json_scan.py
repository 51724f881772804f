"""JSON objects in a model's text: found in linear time, bounded in size and depth, without regular expressions."""

from __future__ import annotations

import json
from typing import Any

MAX_CHARS = 16_384
MAX_DEPTH = 16
MAX_CANDIDATES = 32


class ObjectScanner:
    """Finds the end of one JSON object that arrives in pieces. Knows strings, so that text in them ends nothing.

    `bad` holds the reason once the object cannot be one: then stop feeding.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.bad = ""
        self._num_chars = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int = 0) -> int:
        """Read `text` from `start`. Returns the index after the object's last brace, or -1 where it has not ended.

        When `bad` is set, the index is that of the character that cannot belong to the object.
        """
        for index in range(start, len(text)):
            self._num_chars += 1
            if self._num_chars > MAX_CHARS:
                self.bad = f"longer than {MAX_CHARS} characters"
                return index
            character = text[index]
            if self._in_string:
                self._read_in_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
                if self.depth > MAX_DEPTH:
                    self.bad = f"nested deeper than {MAX_DEPTH}"
                    return index
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return index + 1
            elif character == "<":
                self.bad = "its JSON does not close"
                return index
        return -1

    def _read_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def decode_object(text: str) -> dict[str, Any] | None:
    """The object that `text` is, whole and bounded; None where it is anything else. Raw newlines in strings pass."""
    if not text.startswith("{") or ObjectScanner().feed(text) != len(text):
        return None
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def find_objects(text: str) -> list[dict[str, Any]]:
    """All objects in `text` that do not lie in another one, in order: in fences, in tags, in prose or bare.

    At most `MAX_CANDIDATES` opening braces are tried, which keeps hostile text linear.
    """
    found = []
    position = text.find("{")
    for _ in range(MAX_CANDIDATES):
        if position < 0:
            break
        scanner = ObjectScanner()
        end = scanner.feed(text, position)
        if end < 0:
            # Never closed: all that follows may lie inside it, and what lies inside must not be taken for the whole.
            break
        value = None if scanner.bad else decode_object(text[position:end])
        if value is not None:
            found.append(value)
        position = text.find("{", end if value is not None else position + 1)
    return found


def printable(text: str) -> str:
    """`text` with lone surrogates, which JSON's escapes can make but nothing can encode, replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
