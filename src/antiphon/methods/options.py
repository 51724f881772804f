"""`ParSerOptions`: every knob of the method, validated in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from antiphon.engine.errors import InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.sharding import check_shard_size

ReplyGrammar = Literal["unknown-or-json", "verbatim", "none"]
Gate = Literal["first-token", "likelihood", "both", "none"]


@dataclass(frozen=True)
class ParSerOptions:
    """Paper: 12 turns of a thinking driver, 2,048 tokens each; workers at temperature 0.7, 512 new tokens; no grammars.

    Ours by default: greedy workers, grammars for both models, a first turn that must query, and, for the embedded pair
    (whose worker locates well and answers badly, docs/results.md), the likelihood gate before a second reader; with
    a worker that can abstain, `gate="first-token", readers=0, second_reader=False` is exact. Lengths are tokens.
    `max_repeats` turns in a row that only repeat earlier queries force the answer (0 never does).
    `driver_context` 0 is the driver's own limit. `readers` is how many shards of a query go on
    after the gate (0: all that do not abstain). `overlap` lets work that does not wait for other work run beside it:
    the document is read during the driver's first turn, and a query is asked while the driver writes the next; it
    changes when things happen, not what.
    `shard_tokens` and `shard_overlap` are for documents that `ParSer.ask` registers itself.
    """

    rounds: int = 12
    driver_max_new_tokens: int = 2048
    driver_thinking: bool = False
    driver_grammar: bool = True
    driver_context: int = 0
    query_first: bool = True
    max_queries: int = 2
    max_repeats: int = 2
    worker_max_new_tokens: int = 512
    worker_temperature: float = 0.0
    worker_top_p: float = 1.0
    reply_grammar: ReplyGrammar = "unknown-or-json"
    gate: Gate = "likelihood"
    readers: int = 3
    second_reader: bool = True
    observation_tokens: int = 2048
    shard_tokens: int = 512
    shard_overlap: int = 0
    overlap: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.rounds >= 1, "rounds must be at least 1"),
            (self.driver_max_new_tokens >= 1, "driver_max_new_tokens must be at least 1"),
            (self.driver_context >= 0, "driver_context must not be negative"),
            (1 <= self.max_queries <= 16, "max_queries must lie between 1 and 16"),
            (self.max_repeats >= 0, "max_repeats must not be negative"),
            (self.reply_grammar in get_args(ReplyGrammar), f"reply_grammar must be one of {get_args(ReplyGrammar)}"),
            (self.gate in get_args(Gate), f"gate must be one of {get_args(Gate)}"),
            (self.readers >= 0, "readers must not be negative"),
            (self.gate != "likelihood" or self.readers > 0, "the likelihood gate needs a number of readers"),
            (self.observation_tokens >= 64, "observation_tokens must be at least 64"),
        )
        for holds, message in checks:
            if not holds:
                raise InputError(f"ParSer options: {message} ({self})")
        check_shard_size(self.shard_tokens, self.shard_overlap)
        self.worker_sampling()

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> ParSerOptions:
        """Options from a parsed file or request; raises `InputError` that names any key there is no option for."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise InputError(
                f"ParSer options: no option named {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        return cls(**raw)

    def worker_sampling(self) -> SamplingParams:
        """How workers turn logits into replies."""
        return SamplingParams(
            max_new_tokens=self.worker_max_new_tokens,
            temperature=self.worker_temperature,
            top_p=self.worker_top_p,
            seed=self.seed,
        )

    def driver_sampling(self, max_new_tokens: int) -> SamplingParams:
        """The driver is greedy (paper: temperature 0)."""
        return SamplingParams(max_new_tokens=max_new_tokens, seed=self.seed)
