"""`Row`: one prefix × one suffix on its way through the core; its result when it ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import torch

from antiphon.engine.batch import Phase
from antiphon.engine.grammar import GrammarState
from antiphon.engine.prefix_store import Keep, Prefix
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.quoted_text import QuotedText


class RowKind(IntEnum):
    """What a row is for. Lower values are picked first."""

    DRIVER = 0
    SUFFIX = 1
    READ = 2


class FinishReason(Enum):
    """Why a row ended. `GATED`: the gate stopped it after its first token."""

    STOP = "stop"
    LENGTH = "length"
    GATED = "gated"
    READ = "read"


@dataclass(frozen=True)
class RowResult:
    """What a row came to. `token_ids[:context_tokens]` are computed; a read's `prefix` is declared, with one user, and
    `saved` is done when its state is in the saved tier, where that was asked."""

    token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    mean_score: float | None
    context_tokens: int
    prefill_tokens: int
    cached_tokens: int
    logprobs: tuple[float, ...] = ()
    prefix: Prefix | None = None
    saved: Future[None] | None = None

    @property
    def decode_tokens(self) -> int:
        """Tokens that were generated."""
        return len(self.new_token_ids)


FirstTokenGate = Callable[["Row", torch.Tensor], None]


@dataclass(eq=False)
class Row:
    """State of one row. `token_ids` is everything: computed (`context_tokens` of them), pending, generated::

        | token_ids[:context_tokens] in pages | pending: token_ids[context_tokens:] |

    `score_start`/`score_stop` are positions whose tokens' log-probabilities are wanted. `gate`, if given, is called
    with the row and its first logits when its suffix is computed, and must hand it back with `Lane.resume` or
    `Lane.retire`, then or later. With an `owner` (a session) the lane keeps the pages for it when the row ends well.
    A read's `keep` declares its tokens as a prefix, whose state is also put into the saved tier with `save`; a read
    that `restores` a prefix gives its pages to that one. `corpus` is whose sweep the row joins (`Waiting`). `quotes` is
    what its reply is likely to quote: only how fast it decodes depends on it. `on_tokens` is told of new tokens as they
    come, on the core's thread; it must not raise.
    `first_token_at` is `time.perf_counter()` when its suffix was computed and its first token sampled.
    """

    kind: RowKind
    token_ids: list[int]
    params: SamplingParams
    order: int = 0
    prefix: Prefix | None = None
    pages: list[int] = field(default_factory=list)
    context_tokens: int = 0
    grammar: GrammarState | None = None
    score_start: int = 0
    score_stop: int = 0
    gate: FirstTokenGate | None = None
    owner: object | None = None
    keep: Keep | None = None
    save: bool = False
    restores: Prefix | None = None
    corpus: Hashable | None = None
    use_cached: bool = False
    quotes: QuotedText | None = None
    on_tokens: Callable[[Sequence[int]], None] | None = None

    phase: Phase = Phase.EXTEND
    identity: int = 0
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    prefill_tokens: int = 0
    cached_tokens: int = 0
    first_token_id: int = -1
    first_token_at: float | None = None
    future: Future[RowResult] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # ended by the lane alone: an abort is a request, not a cancel

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed."""
        return len(self.token_ids) - self.context_tokens

    @property
    def max_tokens(self) -> int:
        """The longest this row can get."""
        return len(self.token_ids) + self.params.max_new_tokens - len(self.new_token_ids)

    def result(
        self, reason: FinishReason, prefix: Prefix | None = None, saved: Future[None] | None = None
    ) -> RowResult:
        """The row's outcome as it stands."""
        return RowResult(
            token_ids=tuple(self.token_ids),
            new_token_ids=tuple(self.new_token_ids),
            finish_reason=reason,
            mean_score=sum(self.scores) / len(self.scores) if self.scores else None,
            context_tokens=self.context_tokens,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            logprobs=tuple(self.logprobs[: len(self.new_token_ids)]),
            prefix=prefix,
            saved=saved,
        )
