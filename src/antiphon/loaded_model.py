"""`LoadedModel`: a model with its tokenizer, chat format and lane; what a role (worker or driver) stands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.engine.chat import ChatFormat, WorkerSuffix
from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import AntiphonError
from antiphon.engine.prefix_store import Keep, Prefix
from antiphon.engine.sampling_params import SamplingParams
from antiphon.engine.tokenizer import Tokenizer
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.gate import GateOptions
from antiphon.scheduler.round import RoundRequest, RoundResult, run_round
from antiphon.scheduler.row import RowResult
from antiphon.scheduler.session import Session


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One model, ready. `weight_bytes` and `pool_bytes` are what the ledger has for it."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    chat: ChatFormat
    client: LaneClient
    max_context_tokens: int
    weight_bytes: int
    pool_bytes: int

    @property
    def pool_pages(self) -> int:
        """Pages of its KV pool."""
        return self.client.lane.store.pool.num_pages

    def session(self) -> Session:
        """A new conversation."""
        return Session(self.client, self.tokenizer, self.chat.end_id(), self.max_context_tokens)

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, without end tokens."""
        return self.tokenizer.decode([token_id for token_id in token_ids if token_id not in self.tokenizer.eos_ids])

    def first_token_ids(self, text: str) -> tuple[int, ...]:
        """Ids of the tokens that `text` can start with: its non-empty beginnings that are one token."""
        vocabulary = self.tokenizer.hf.get_vocab()
        beginnings = (text[:length] for length in range(1, len(text) + 1))
        return tuple(vocabulary[beginning] for beginning in beginnings if beginning in vocabulary)

    async def read(self, token_ids: Sequence[int], parent: Prefix | None = None) -> Prefix:
        """Declares a pinned prefix of `parent`'s tokens and these; release it with `release`."""
        return (await self.read_counted(token_ids, parent))[0]

    async def read_counted(self, token_ids: Sequence[int], parent: Prefix | None = None) -> tuple[Prefix, int]:
        """As `read`, with the number of tokens that had to be computed."""
        result = await self.client.read_prefix(token_ids, parent)
        if result.prefix is None:
            raise AntiphonError("a read row ended without a prefix")
        return result.prefix, result.prefill_tokens

    async def read_all(
        self,
        token_lists: Sequence[Sequence[int]],
        parent: Prefix | None,
        on_done: Callable[[int, RowResult], None] | None = None,
        *,
        save: bool = False,
    ) -> list[RowResult]:
        """Declares many movable prefixes behind one parent; with `save` also puts their states into the saved tier."""
        return await self.client.read_prefixes(token_lists, parent, keep=Keep.MOVABLE, save=save, on_done=on_done)

    async def round(
        self, prefixes: Sequence[Prefix], suffixes: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> RoundResult:
        """A bare round: every prefix × every suffix, no gate and no grammar."""
        request = RoundRequest(
            prefixes,
            [WorkerSuffix(tuple(suffix), 0, 0) for suffix in suffixes],
            sampling,
            GateOptions("none"),
            [None] * len(prefixes),
        )
        return await run_round(self.client, request)

    def release(self, prefixes: Sequence[Prefix]) -> None:
        """Gives up prefixes that were read."""
        self.client.release(prefixes)
