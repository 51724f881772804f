"""`Session`: a conversation as tokens. Its keys and values stay where they are between turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from antiphon.engine.errors import AntiphonError, CapacityError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.engine.stream_decoder import StreamDecoder
from antiphon.engine.tokenizer import Tokenizer
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.row import FinishReason, Row, RowKind


@dataclass(frozen=True)
class Generation:
    """One turn: its tokens and text (without the end token), why it ended, and what it cost in tokens."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int
    logprobs: tuple[float, ...] = ()


class Session:
    """Token-in, token-out: what was generated is continued exactly as it was, never rendered again.

    `max_tokens` is the model's context; a turn that cannot fit raises `CapacityError` before anything is computed.
    """

    def __init__(self, client: LaneClient, tokenizer: Tokenizer, end_id: int, max_tokens: int) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._max_tokens = max_tokens
        self._turn_end = 0
        self._closed = False
        self.token_ids: list[int] = []

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit the context."""
        return self._max_tokens - len(self.token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that the model is to read before its next turn."""
        self.token_ids += token_ids

    async def generate(
        self, params: SamplingParams, grammar: str | None = None, on_text: Callable[[str], None] | None = None
    ) -> Generation:
        """Reads what was appended and generates one turn. An ended turn always ends with the end token. `on_text` is
        called on this event loop with the text as it comes, in whole characters; all of it has come, and is
        `Generation.text`, when this returns."""
        state = None if grammar is None else await self._client.call(lambda: self._client.grammars.start(grammar))
        if self._closed:  # from here on to the row's submission nothing is awaited, so that no row outlives a close
            raise AntiphonError("session: it was closed, open another")
        if len(self.token_ids) == self._turn_end:
            raise AntiphonError("session: nothing was appended since the last turn")
        if params.max_new_tokens >= self.free_tokens:
            raise CapacityError(
                f"session: {len(self.token_ids)} tokens and {params.max_new_tokens} new ones do not fit the context "
                f"of {self._max_tokens} tokens. Ask for fewer new tokens, or start another session."
            )
        row = Row(RowKind.DRIVER, list(self.token_ids), params, grammar=state, owner=self, use_cached=True)
        stream = None if on_text is None else TextStream(self._tokenizer, on_text)
        row.on_tokens = None if stream is None else stream.post
        result = (await self._client.run_rows([row]))[0]
        if stream is not None:
            stream.finish()
        self.token_ids = list(result.token_ids)
        new_ids = list(result.new_token_ids)
        ended = bool(new_ids) and new_ids[-1] in self._tokenizer.eos_ids
        if not ended:
            self.token_ids.append(self._end_id)
        self._turn_end = len(self.token_ids)
        return Generation(
            token_ids=tuple(new_ids),
            text=self._tokenizer.decode(new_ids[:-1] if ended else new_ids),
            finish_reason="stop" if result.finish_reason is FinishReason.STOP else "length",
            prefill_tokens=result.prefill_tokens,
            cached_tokens=result.cached_tokens,
            decode_tokens=result.decode_tokens,
            logprobs=result.logprobs,
        )

    def close(self) -> None:
        """Aborts a turn that is under way and releases the pages; what is in full pages may be found again by another
        session."""
        if not self._closed:
            self._closed = True
            self._client.core.call(lambda: self._client.lane.drop_kept(self))


class TextStream:
    """From a row's tokens on the core's thread to text on the event loop that made this."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._on_text = on_text
        self._loop = asyncio.get_running_loop()
        self._held: list[int] = []  # an end token, which is text only where others follow it

    def post(self, token_ids: Sequence[int]) -> None:
        """Called on the core's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more, and the row is about to be aborted
            self._loop.call_soon_threadsafe(self._take, list(token_ids))

    def finish(self) -> None:
        """The turn ended."""
        self._tell(self._decoder.flush())

    def _take(self, token_ids: list[int]) -> None:
        token_ids = [*self._held, *token_ids]
        num_shown = len(token_ids) - (token_ids[-1] in self._tokenizer.eos_ids)
        self._held = token_ids[num_shown:]
        self._tell("".join(map(self._decoder.push, token_ids[:num_shown])))

    def _tell(self, text: str) -> None:
        if text:
            self._on_text(text)
