"""What the driver is shown of a query's findings: data in JSON lines, fitted to a token budget, losses said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from antiphon.results import Evidence

MIN_QUOTE_CHARS = 80


def observation(
    query: str, findings: Sequence[Evidence], *, num_shards: int, max_tokens: int, count_tokens: Callable[[str], int]
) -> str:
    """The tool result of one query: a line that says what follows, then one JSON object a finding, in given order.

    Takes at most `max_tokens`, as far as the first line and a line on what was left out allow. A first finding that is
    too long by itself is shown with a shortened quote, which then ends in an ellipsis.
    """
    if not findings:
        return f"No shard answers this query ({num_shards} shards were asked): {_quoted(query)}"
    head = f"Findings for {_quoted(query)} ({len(findings)} from {num_shards} shards):"
    room = max_tokens - count_tokens(head) - count_tokens(_left_out(len(findings)))
    lines: list[str] = []
    for finding in findings:
        line = _line(finding)
        if count_tokens(line) + 1 > room and not lines:
            line = _shortened(finding, room, count_tokens)
        cost = count_tokens(line) + 1
        if cost > room:
            break
        lines.append(line)
        room -= cost
    num_left_out = len(findings) - len(lines)
    return "\n".join([head, *lines, *([_left_out(num_left_out)] if num_left_out else [])])


def split_budget(max_tokens: int, num_queries: int) -> int:
    """Tokens for each of a turn's observations."""
    return max_tokens // max(1, num_queries)


def _line(finding: Evidence, quote: str | None = None) -> str:
    fields = {
        "shard": finding.shard,
        "answer": finding.answer,
        "evidence": finding.quote if quote is None else quote,
        "verified": finding.verified,
    }
    return _as_data(fields)


def _shortened(finding: Evidence, room: int, count_tokens: Callable[[str], int]) -> str:
    quote = finding.quote
    while len(quote) > MIN_QUOTE_CHARS:
        quote = quote[: len(quote) // 2]
        line = _line(finding, quote + "…")
        if count_tokens(line) + 1 <= room:
            return line
    return _line(finding)


def _left_out(num_left_out: int) -> str:
    return f"… {num_left_out} further findings left out"


def _quoted(query: str) -> str:
    return _as_data(query)


def _as_data(value: object) -> str:
    # `<\/` is the same JSON string as `</`: text of a document can then never close the tag that a template puts
    # around a tool result.
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")
