"""`SecondReader`: the driver's model in a worker's role, for the few shards that the first reader found likely.

It reads with its own context and its own cached prefixes; the driver itself still never sees the document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from antiphon.engine.prefix_store import Keep, Prefix
from antiphon.loaded_model import LoadedModel
from antiphon.methods.backend import ScatterOptions
from antiphon.methods.worker_reply import ABSTENTION
from antiphon.scheduler.gate import GateOptions
from antiphon.scheduler.round import RoundRequest, RoundResult, RowReply, run_round
from antiphon.sharding import Shard


class SecondReader:
    """Reads shards on demand. Their prefixes are kept while there is room, so that a later round finds them."""

    def __init__(self, model: LoadedModel, instructions: str) -> None:
        self._model = model
        self._instruction_ids = model.chat.worker_prefix(instructions)
        self._instructions: Prefix | None = None
        self._lock = asyncio.Lock()

    async def ask(self, query: str, shards: Sequence[Shard], options: ScatterOptions) -> RoundResult:
        """One query to these shards; rows that abstain end with their first token. `prefill_tokens` counts what had
        to be read."""
        if not shards:
            return RoundResult((), 0.0, 0.0, 0.0, 0, 0, 0)
        instructions = await self._read_instructions()
        texts = [self._model.chat.shard_tokens(shard.text) for shard in shards]
        reads = await self._model.client.read_prefixes(texts, instructions, keep=Keep.CACHED)
        prefixes = [result.prefix for result in reads if result.prefix is not None]
        try:
            request = RoundRequest(
                prefixes=prefixes,
                suffixes=[self._model.chat.worker_suffix(query)],
                params=options.sampling,
                gate=GateOptions("none" if options.grammar == "none" else "first-token"),
                grammars=[options.reply_lark(shard.text) for shard in shards],
                abstain_ids=self._model.first_token_ids(ABSTENTION),
            )
            result = await run_round(self._model.client, request)
        finally:
            self._model.release(prefixes)
        read_tokens = sum(read.prefill_tokens for read in reads)
        return replace(result, prefill_tokens=result.prefill_tokens + read_tokens)

    def text(self, reply: RowReply) -> str:
        """A reply's text without its end token."""
        return self._model.text(reply.token_ids)

    def release(self) -> None:
        """Gives up the instructions' prefix; shards' prefixes are evicted when their pages are wanted."""
        if self._instructions is not None:
            self._model.release([self._instructions])
            self._instructions = None

    async def _read_instructions(self) -> Prefix:
        async with self._lock:
            if self._instructions is None:
                self._instructions = await self._model.read(self._instruction_ids)
            return self._instructions
