"""A worker's reply: the grammar it is written under, and what it says. Exactly `Unknown`, or evidence and an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from antiphon.engine.errors import InputError
from antiphon.methods.driver_grammar import JSON_STRING_CHAR
from antiphon.methods.json_scan import decode_object, find_objects, printable
from antiphon.methods.tool_calls import THINK_CLOSE

ABSTENTION = "Unknown"
EVIDENCE_CHARS = 400
ANSWER_CHARS = 200

_STRING = rf'({JSON_STRING_CHAR}|\\["\\nrt])'
_START = rf'start: "{ABSTENTION}" | "{{\"evidence\":\"" EVIDENCE "\",\"answer\":\"" ANSWER "\"}}"'
_ANSWER = rf"ANSWER: /{_STRING}{{1,{ANSWER_CHARS}}}/"
# A chunk is a word, or any one character; scripts written without spaces are cut by character.
_CHUNK = re.compile(r"[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|.", re.DOTALL)


def reply_grammar(kind: Literal["unknown-or-json", "verbatim"], shard_text: str | None = None) -> str:
    """Lark text for a reply: `Unknown`, or `{"evidence":"…","answer":"…"}` without free whitespace.

    Evidence has 1 to 400 characters and the answer 1 to 200, counted as written in JSON. Under "verbatim" the
    evidence is a run of whole words of `shard_text`, so that it stands in the shard by construction.
    """
    if kind == "unknown-or-json":
        return "\n".join((_START, rf"EVIDENCE: /{_STRING}{{1,{EVIDENCE_CHARS}}}/", _ANSWER, ""))
    if kind != "verbatim" or not shard_text:
        raise InputError(f"reply grammar {kind!r}: known are 'unknown-or-json', and 'verbatim' with a shard's text")
    # Each chunk is escaped by itself: escaping goes character by character, so the run of escaped chunks is the
    # escaped run of chunks, and no substring can begin or end inside an escape.
    chunks = [json.dumps(chunk, ensure_ascii=False)[1:-1] for chunk in _CHUNK.findall(shard_text)]
    shard = f"SHARD: %regex {json.dumps({'substring_chunks': chunks}, ensure_ascii=False)}"
    # A substring may be empty; the second term makes it start with something and bounds its length.
    evidence = rf"EVIDENCE: SHARD & /[^ ](?s:.{{0,{EVIDENCE_CHARS - 1}}})/"
    return "\n".join((_START, shard, evidence, _ANSWER, ""))


@dataclass(frozen=True)
class Abstention:
    """The shard does not answer the query."""


@dataclass(frozen=True)
class Finding:
    """A reply with a quote that is meant to be the shard's own words, and the answer that it supports."""

    evidence: str
    answer: str


@dataclass(frozen=True)
class Malformed:
    """A reply that is neither: a failed finding, never used."""

    reason: str


def parse_reply(text: str, finish_reason: str = "stop") -> Abstention | Finding | Malformed:
    """What a reply says. Strict JSON first, then what workers without a grammar write: fences, prose around, `Unknown.`

    A reply that was cut by its length and whose JSON does not close is `Malformed`.
    """
    stripped = text.strip()
    if _is_unknown(stripped):
        return Abstention()
    fields = decode_object(stripped)
    if fields is not None:
        return _finding(fields)
    # The last object is the reply: workers that reason aloud write their result at the end.
    stripped = stripped.rpartition(THINK_CLOSE)[2].strip()
    for fields in reversed(find_objects(stripped)):
        if "answer" in fields or "evidence" in fields:
            return _finding(fields)
    if "{" in stripped:
        return Malformed("cut by its length" if finish_reason == "length" else "broken JSON")
    if _is_unknown(stripped.partition("\n")[0]) or stripped.startswith(ABSTENTION):
        return Abstention()
    return Malformed("neither Unknown nor JSON" if stripped else "empty reply")


def _finding(fields: Mapping[str, Any]) -> Abstention | Finding | Malformed:
    evidence, answer = (_as_text(fields.get(name)) for name in ("evidence", "answer"))
    if _is_unknown(answer) or (_is_unknown(evidence) and not answer):
        return Abstention()
    if not evidence or not answer:
        return Malformed("no evidence" if not evidence else "no answer")
    return Finding(evidence, answer)


def _as_text(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    return printable(value).strip() if isinstance(value, str) else ""


def _is_unknown(text: str) -> bool:
    return text.strip("`'\"*.! \n").casefold() == ABSTENTION.casefold()
