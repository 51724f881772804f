"""Prints an answer: the answer itself, its evidence, and what it cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from antiphon.cli.console import clean, clean_lines
from antiphon.results import Answer, Evidence


def print_answer(console: Console, answer: Answer, *, quiet: bool) -> None:
    """The answer, then evidence, notes and cost; the answer's text alone when `quiet`."""
    lines = [Text(line) for line in clean_lines(answer.answer).split("\n")]
    if quiet:
        _print_lines(console, lines, indent=0)
        return
    _print_section(console, "Answer", lines)
    if answer.evidence:
        console.print(Text("Evidence", "bold"))
        for evidence in answer.evidence:
            _print_evidence(console, evidence)
        console.print()
    if answer.notes:
        _print_section(console, "Notes", (Text(clean(note)) for note in answer.notes))
    _print_section(console, "Cost", _cost_lines(answer))


def answer_json(answer: Answer) -> str:
    """One JSON object on one line, in ASCII; numbers that JSON does not have become null."""
    return json.dumps(_finite(answer.to_json()), allow_nan=False)


def location(evidence: Evidence) -> str:
    """Where a finding stands: source and line, or page, or the shard where neither is known."""
    source = clean(evidence.source)
    if evidence.page is not None:
        return f"{source} p. {evidence.page}"
    if evidence.line is not None:
        return f"{source}:{evidence.line}"
    return f"{source} shard {evidence.shard}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _print_section(console: Console, title: str, lines: Iterable[Text]) -> None:
    console.print(Text(title, "bold"))
    _print_lines(console, lines, indent=2)
    console.print()


def _print_lines(console: Console, lines: Iterable[Text], *, indent: int) -> None:
    # Line by line: rich pads all lines of one block to the longest, which would fill pipes with spaces.
    for line in lines:
        console.print(Padding(line, (0, 0, 0, indent), expand=False) if line and indent else line)


def _print_evidence(console: Console, evidence: Evidence) -> None:
    mark = ("✓", "bold green") if evidence.verified else ("unverified", "yellow")
    about = f"shard {evidence.shard}, round {evidence.round}"
    if evidence.relevance is not None:
        about += f", relevance {evidence.relevance:.2f}"
    _print_lines(console, [Text.assemble(mark, " ", (location(evidence), "cyan"))], indent=2)
    quote = Text(f"“{clean(evidence.quote)}”", "italic")
    _print_lines(console, [quote, Text.assemble("→ ", clean(evidence.answer)), Text(about, "bright_black")], indent=4)


def _cost_lines(answer: Answer) -> Iterator[Text]:
    usage, seconds = answer.usage, answer.seconds
    yield Text(f"{'tokens':<8}{'read':>12}{'reused':>12}{'decoded':>12}", "bright_black")
    for name, counts in (
        ("worker", (usage.worker_prefill_tokens, usage.worker_cached_tokens, usage.worker_decode_tokens)),
        ("driver", (usage.driver_prefill_tokens, usage.driver_cached_tokens, usage.driver_decode_tokens)),
    ):
        yield Text(f"{name:<8}" + "".join(f"{count:>12,}" for count in counts))
    document = f"document of {usage.document_tokens:,} tokens in {_count(usage.shards, 'shard')}"
    yield Text(f"{document}, {_count(len(answer.rounds), 'round')}, method {answer.method}")
    yield Text(f"stopped: {clean(answer.stopped)}")
    phases = (("load", seconds.load), ("read", seconds.read), ("rounds", seconds.rounds), ("driver", seconds.driver))
    yield Text(", ".join(f"{name} {value:.1f} s" for name, value in (*phases, ("total", seconds.total))))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
