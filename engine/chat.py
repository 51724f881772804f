"""Prompts as tokens: a model's chat template around contents that are always encoded as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.engine.errors import ModelError
from antiphon.engine.tokenizer import Tokenizer

Message = Mapping[str, str]


def _slot(index: int) -> str:
    """A stand-in for a message's content while the template is rendered."""
    return f"ANTIPHONxSLOTx{index}x"


@dataclass(frozen=True)
class WorkerSuffix:
    """A query behind a shard's prefix; tokens `query_start` to `query_stop - 1` are the query's own words."""

    token_ids: tuple[int, ...]
    query_start: int
    query_stop: int


class ChatFormat:
    """Renders a tokenizer's own template, splits it at the contents, and encodes template text and contents apart:
    `<|im_end|>` in a document is text, in the template it is the control token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **flags: Any
    ) -> list[int]:
        """The whole prompt with the generation prompt at its end. `messages` have `role` and `content`."""
        slotted = [{**message, "content": _slot(index)} for index, message in enumerate(messages)]
        text = self._tokenizer.render_chat(
            slotted, tools=list(tools) if tools else None, add_generation_prompt=True, **flags
        )
        return self._fill(text, {_slot(index): message["content"] for index, message in enumerate(messages)})

    def continuation(self, tool_results: Sequence[str], **flags: Any) -> list[int]:
        """Tokens that follow an ended assistant turn: the tool results and the next generation prompt."""
        return self._after_turn([("tool", result) for result in tool_results], flags)

    def user_continuation(self, content: str, **flags: Any) -> list[int]:
        """Tokens that follow an ended assistant turn: a user's message and the next generation prompt."""
        return self._after_turn([("user", content)], flags)

    def worker_prefix(self, instructions: str) -> list[int]:
        """The instructions' prefix, shared by all shards: everything before a shard's text."""
        before, between, _ = self._worker_parts()
        encode = self._tokenizer
        return [*encode.encode_control(before), *encode.encode(instructions), *encode.encode_control(between)]

    def shard_tokens(self, text: str) -> list[int]:
        """A shard's own tokens. They end with a newline, and the suffix starts with a letter: the fixed seam."""
        return self._tokenizer.encode(text.rstrip() + "\n")

    def worker_suffix(self, query: str, lead: str = "Question: ") -> WorkerSuffix:
        """The query behind the fixed word `lead`, and the template's tail up to where the reply starts."""
        text = lead + " ".join(query.split())
        token_ids, offsets = self._tokenizer.encode_with_offsets(text)
        own = [index for index, (start, _) in enumerate(offsets) if start >= len(lead.rstrip())]
        tail = self._tokenizer.encode_control(self._worker_parts()[2])
        first, stop = (own[0], own[-1] + 1) if own else (len(token_ids), len(token_ids))
        return WorkerSuffix((*token_ids, *tail), first, stop)

    def end_id(self) -> int:
        """The token that the template puts at the end of an assistant's turn."""
        messages = [{"role": "user", "content": _slot(0)}, {"role": "assistant", "content": _slot(1)}]
        rest = self._tokenizer.render_chat(messages, add_generation_prompt=False).partition(_slot(1))[2]
        token_ids = self._tokenizer.encode_control(rest)
        if not token_ids or token_ids[0] not in self._tokenizer.eos_ids:
            raise ModelError("chat template: an assistant's turn does not end with an end token")
        return token_ids[0]

    def _worker_parts(self) -> tuple[str, str, str]:
        messages = [{"role": "system", "content": _slot(0)}, {"role": "user", "content": _slot(1)}]
        text = self._tokenizer.render_chat(messages, add_generation_prompt=True, enable_thinking=False)
        before, found_first, rest = text.partition(_slot(0))
        between, found_second, after = rest.partition(_slot(1))
        if not found_first or not found_second:
            raise ModelError("chat template: it drops the system or the user message, workers need both")
        return before, between, after

    def _after_turn(self, messages: Sequence[tuple[str, str]], flags: Mapping[str, Any]) -> list[int]:
        slotted = [{"role": "user", "content": _slot(0)}, {"role": "assistant", "content": _slot(1)}]
        contents = {}
        for index, (role, content) in enumerate(messages, start=2):
            slotted.append({"role": role, "content": _slot(index)})
            contents[_slot(index)] = content
        text = self._tokenizer.render_chat(slotted, add_generation_prompt=True, **flags)
        _, found, rest = text.partition(_slot(1))
        if not found:
            raise ModelError("chat template: it drops the assistant's turn, a session needs it")
        token_ids = self._fill(rest, contents)
        return token_ids[1:] if token_ids[0] in self._tokenizer.eos_ids else token_ids

    def _fill(self, text: str, contents: Mapping[str, str]) -> list[int]:
        token_ids: list[int] = []
        for slot, content in contents.items():
            before, found, text = text.partition(slot)
            if not found:
                raise ModelError("chat template: it drops or reorders a message")
            token_ids += self._tokenizer.encode_control(before)
            token_ids += self._tokenizer.encode(content)
        return token_ids + self._tokenizer.encode_control(text)
