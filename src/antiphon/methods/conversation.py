"""The driver's side of a question: one session that grows by turns and tool results, and never past its context."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from antiphon.engine.errors import AbortedError, CapacityError
from antiphon.methods.backend import Engine
from antiphon.methods.driver_grammar import TurnKind, driver_grammar
from antiphon.methods.driver_turn import QueryStream
from antiphon.methods.options import ParSerOptions
from antiphon.methods.prompts import ParSerPrompts
from antiphon.methods.tool_calls import CALL_OPEN, THINK_CLOSE, THINK_OPEN
from antiphon.results import Usage
from antiphon.scheduler.trace import traced

MIN_TURN_TOKENS = 32
MAX_ANSWER_TOKENS = 512


@dataclass(frozen=True)
class Turn:
    """What the driver wrote; `in_thinking` says that it began inside a thought."""

    text: str
    finish_reason: str
    in_thinking: bool
    seconds: float


class Conversation:
    """History in tokens: appended to, never rewritten, so that every earlier token's KV serves every later turn::

    | prompt | turn 1 | results 1 | turn 2 | … | room | kept free for the forced answer |
    """

    def __init__(
        self, engine: Engine, options: ParSerOptions, prompts: ParSerPrompts, question: str, usage: Usage
    ) -> None:
        self._options = options
        self._tokenizer = engine.driver.tokenizer
        self._chat = engine.driver.chat
        self._usage = usage
        self._last_turn = prompts.last_turn
        self._flags = {"enable_thinking": options.driver_thinking}
        messages = [{"role": "system", "content": prompts.driver_system}, {"role": "user", "content": question}]
        # What the driver reads before its next turn: the prompt, then tool results.
        self._unread = self._chat.prompt(messages, [prompts.query_tool()], **self._flags)
        self._results: list[str] = []
        notice_tokens = len(self._forced_opening([]))
        self._session = engine.session("driver")
        self._trace = engine.trace
        # What is never used, so that it looks to the driver as if its context were shorter.
        self._withheld_tokens = max(0, self._session.free_tokens - (options.driver_context or sys.maxsize))
        self._answer_tokens = self._choose_answer_tokens()
        # One more token each for the end of the last turn and of the forced one.
        self._reserved_tokens = self._answer_tokens + notice_tokens + 2
        if self.is_full:
            self._refuse()

    def _choose_answer_tokens(self) -> int:
        free_thought = self._options.driver_thinking and not self._options.driver_grammar
        longest = self._options.driver_max_new_tokens if free_thought else MAX_ANSWER_TOKENS
        context_tokens = self._session.free_tokens - self._withheld_tokens
        return max(1, min(longest, self._options.driver_max_new_tokens, context_tokens // 8))

    def _refuse(self) -> NoReturn:
        context_tokens = self._session.free_tokens - self._withheld_tokens
        needed_tokens = len(self._unread) + self._reserved_tokens + MIN_TURN_TOKENS
        self.close()
        raise CapacityError(
            f"the question and the instructions need {needed_tokens} tokens of the driver's context, which has "
            f"{context_tokens}: shorten the question, or use a driver with a longer context"
        )

    @property
    def room_tokens(self) -> int:
        """Tokens free for tool results and the next turn, beside what is kept for the forced answer."""
        return self._session.free_tokens - self._withheld_tokens - self._reserved_tokens - len(self._unread)

    @property
    def is_full(self) -> bool:
        """Whether only the forced answer still fits."""
        return self.room_tokens < MIN_TURN_TOKENS

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` as the driver reads it."""
        return len(self._tokenizer.encode(text))

    def add_results(self, results: list[str]) -> None:
        """Put tool results after the last turn; they are read with the next one."""
        self._results += results
        self._unread = self._chat.continuation(self._results, **self._flags)

    async def turn(self, kind: TurnKind, on_query: Callable[[str], None] | None = None) -> Turn:
        """Have the driver write one turn under the grammar of `kind`, or freely where grammars are off. `on_query` is
        called with each query as soon as its call is complete."""
        max_new_tokens = min(self._options.driver_max_new_tokens, self.room_tokens)
        return await self._generate(self._unread, kind, max_new_tokens, on_query)

    async def forced_answer(self) -> Turn:
        """The last turn: no tool, only an answer from what was gathered. Its room was kept free from the beginning."""
        # Unread results that do not fit are left away: the answer then comes from what was read before.
        results = self._results if self.room_tokens >= 0 else []
        return await self._generate(self._forced_opening(results), "answer", self._answer_tokens)

    def _forced_opening(self, results: list[str]) -> list[int]:
        tokens = self._chat.continuation([*results, self._last_turn], **self._flags)
        think_close = self._tokenizer.token_id(THINK_CLOSE)
        if self._ends_in_thought(tokens) and think_close is not None and self._options.driver_grammar:
            # The template opened a thought; the answer's grammar has none, so it is closed at once.
            tokens = [*tokens, think_close, *self._tokenizer.encode("\n\n")]
        return tokens

    def _ends_in_thought(self, tokens: Sequence[int]) -> bool:
        return self._tokenizer.decode(tokens[-4:]).rstrip().endswith(THINK_OPEN)

    async def _generate(
        self,
        tokens: list[int],
        kind: TurnKind,
        max_new_tokens: int,
        on_query: Callable[[str], None] | None = None,
    ) -> Turn:
        started = time.perf_counter()
        in_thinking = self._ends_in_thought(tokens)
        self._session.append(tokens)
        on_text = None if on_query is None else _query_listener(on_query, in_thinking)
        with traced(self._trace, "turns", kind):
            generation = await self._session.generate(
                self._options.driver_sampling(max_new_tokens), self._grammar(kind), on_text
            )
        if generation.finish_reason == "abort":
            raise AbortedError("the question was aborted while the driver was writing")
        self._usage.driver_prefill_tokens += generation.prefill_tokens
        self._usage.driver_cached_tokens += generation.cached_tokens
        self._usage.driver_decode_tokens += generation.decode_tokens
        self._results, self._unread = [], []
        return Turn(
            text=generation.text,
            finish_reason=generation.finish_reason,
            in_thinking=in_thinking,
            seconds=time.perf_counter() - started,
        )

    def _grammar(self, kind: TurnKind) -> str | None:
        if not self._options.driver_grammar:
            return None
        return driver_grammar(
            kind,
            max_queries=self._options.max_queries,
            thinking=self._options.driver_thinking and kind != "answer",
            special_tokens=self._tokenizer.token_id(CALL_OPEN) is not None,
        )

    def close(self) -> None:
        """Release the session and all that it holds."""
        self._session.close()


def _query_listener(on_query: Callable[[str], None], in_thinking: bool) -> Callable[[str], None]:
    stream = QueryStream(in_thinking=in_thinking)

    def hear(text: str) -> None:
        for query in stream.push(text):
            on_query(query)

    return hear
