"""A driver's turn in a line: what it asks or answers, without the syntax of its calls."""

from __future__ import annotations

from antiphon.cli.console import clean
from antiphon.methods.driver_turn import FinalAnswer, Queries, classify_turn


def describe_turn(text: str) -> str:
    """`text` on one line: "asks …" or "answers …" where the turn counts as that, else what was written."""
    match classify_turn(text):
        case Queries(queries):
            return "asks " + ", ".join(f"“{clean(query)}”" for query in queries)
        case FinalAnswer(answer):
            return f"answers “{clean(answer)}”"
    return clean(text) or "wrote nothing"
