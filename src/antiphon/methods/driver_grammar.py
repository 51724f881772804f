"""The grammar of a driver's turn (Lark text for llguidance): native tool calls, or an answer, and nothing else."""

from __future__ import annotations

from typing import Literal

from antiphon.methods.prompts import QUERY_TOOL

TurnKind = Literal["query", "query-or-answer", "answer"]
QUERY_CHARS = 300
ANSWER_CHARS = 1000

# The characters that both models may write inside a JSON string. Kept a superset of llguidance's own string slices,
# which is what makes its masks fast. No control characters, so that a runaway of newlines cannot start.
JSON_STRING_CHAR = r'[^"\\\x00-\x1F\x7F]'

_QUERY = rf'QUERY: /[^"\\\x00-\x20\x7F]({JSON_STRING_CHAR}|\\["\\]){{0,{QUERY_CHARS - 1}}}/'
# A lone `<` is text (`List<int>`); `</` can only begin the closing tag. Text and tag are one terminal, since the lexer
# does not go back from a `<` that it took for text.
_ANSWER = rf"ANSWER: /([^<\s\x00-\x1F]|<[^<\/])([^<]|<[^<\/]){{0,{ANSWER_CHARS - 1}}}<\/answer>/"
_START = {"query": "calls", "query-or-answer": "calls | answer", "answer": "answer"}


def driver_grammar(kind: TurnKind, *, max_queries: int = 4, thinking: bool = False, special_tokens: bool = True) -> str:
    """Lark text for one turn: 1 to `max_queries` calls of the query tool, and/or an `<answer>`, as `kind` says.

    The calls' JSON has the exact spacing that Qwen's chat templates show. `special_tokens` says whether the
    tokenizer has `<tool_call>` and `</tool_call>` as tokens of their own: if so they are written as those tokens, and
    never as text pieces. `thinking` allows a thought, ended by `</think>`, before the turn.
    """
    opening, closing = ("<tool_call>", "</tool_call>") if special_tokens else ('"<tool_call>"', '"</tool_call>"')
    body = rf'"\n{{\"name\": \"{QUERY_TOOL}\", \"arguments\": {{\"query\": \"" QUERY "\"}}}}\n"'
    lines = [f"start: {'thought ' if thinking else ''}turn", f"turn: {_START[kind]}"]
    if kind != "answer":
        more = f' ("\\n" call){{0,{max_queries - 1}}}' if max_queries > 1 else ""
        lines += [f"calls: call{more}", f"call: {opening} {body} {closing}", _QUERY]
    if kind != "query":
        lines += ['answer: "<answer>" ANSWER', _ANSWER]
    if thinking:
        lines += _thought(special_tokens)
    return "\n".join(lines) + "\n"


def _thought(special_tokens: bool) -> list[str]:
    if special_tokens:
        return [r"thought: <think>? /(?s:.*)/ </think> /\n{0,2}/"]
    return [r"thought: thought_body /\n{0,2}/", r"thought_body[lazy]: /(?s:.*)<\/think>/"]
