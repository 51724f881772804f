"""What a round is (step 4 of the reading path): all queries × all prefixes as rows of one batch, in lock-step.

Every row's suffix is computed; the gate ends those that abstain or are not among the likeliest; the rest decode
together and retire as they finish. A prefix is never computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from antiphon.engine.chat import WorkerSuffix
from antiphon.engine.prefix_store import Prefix
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.gate import Gate, GateOptions
from antiphon.scheduler.quoted_text import QuotedText
from antiphon.scheduler.row import FinishReason, Row, RowKind, RowResult


@dataclass(frozen=True)
class RoundRequest:
    """`prefixes × suffixes` rows. `grammars[i]` (Lark, or None) is prefix i's; `baseline` is the prefix with no shard
    text, against which likelihoods are read (needed where the gate scores). `corpus` is whose sweep the rows join,
    where it is open (`Lane.open_corpus`)."""

    prefixes: Sequence[Prefix]
    suffixes: Sequence[WorkerSuffix]
    params: SamplingParams
    gate: GateOptions
    grammars: Sequence[str | None]
    abstain_ids: Sequence[int] = ()
    baseline: Prefix | None = None
    order: int = 0
    corpus: Hashable | None = None


@dataclass(frozen=True)
class RowReply:
    """One row's outcome. `chosen`: the gate let it go on (with `readers_decode` False it still has no text).
    `relevance`: mean log-probability of the query's tokens given the shard, less that given none."""

    prefix_index: int
    query_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    abstained: bool
    chosen: bool
    relevance: float | None


@dataclass(frozen=True)
class RoundResult:
    """All replies, query by query in the order of the prefixes, and what the round cost.

    `seconds` is `prefill_seconds` and `decode_seconds` together: until the last row has its first token, and the rest.
    Where not all rows fit at once, earlier waves' decoding falls into the former.
    """

    replies: tuple[RowReply, ...]
    seconds: float
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int


async def run_round(
    client: LaneClient, request: RoundRequest, on_row: Callable[[int, int, bool], None] | None = None
) -> RoundResult:
    """Scatters and gathers one round. `on_row(prefix_index, query_index, gated)` is called as rows end; a row that was
    chosen for another reader is not `gated`."""
    started = time.perf_counter()
    rows, gates = await client.call(lambda: _build_rows(client, request))
    num_prefixes = len(request.prefixes)

    def report(index: int, result: RowResult) -> None:
        query, prefix = divmod(index, num_prefixes)
        if on_row is not None and query < len(request.suffixes):
            gated = result.finish_reason is FinishReason.GATED and rows[index] not in gates[query].chosen
            on_row(prefix, query, gated)

    results = await client.run_rows(rows, report)
    num_scattered = num_prefixes * len(request.suffixes)
    baselines = [result.mean_score for result in results[num_scattered:]]
    replies = []
    for index in range(num_scattered):
        query, prefix = divmod(index, num_prefixes)
        replies.append(_reply(prefix, query, rows[index], results[index], gates[query], baselines))
    ended = time.perf_counter()
    prefilled = max((row.first_token_at for row in rows if row.first_token_at is not None), default=started)
    return RoundResult(
        replies=tuple(replies),
        seconds=ended - started,
        prefill_seconds=prefilled - started,
        decode_seconds=ended - prefilled,
        prefill_tokens=sum(result.prefill_tokens for result in results),
        cached_tokens=sum(result.cached_tokens for result in results[:num_scattered]),
        decode_tokens=sum(result.decode_tokens for result in results),
    )


def _build_rows(client: LaneClient, request: RoundRequest) -> tuple[list[Row], list[Gate]]:
    """Rows query by query, then one baseline row per query where likelihoods are asked for (core thread)."""
    rows, gates = [], []
    quoted = [_quoted_text(prefix) for prefix in request.prefixes]
    for suffix in request.suffixes:
        gate = Gate(request.gate, client.lane, request.abstain_ids, len(request.prefixes))
        gates.append(gate)
        for prefix, lark, quotes in zip(request.prefixes, request.grammars, quoted, strict=True):
            row = _row(prefix, suffix, request)
            row.quotes = quotes
            row.corpus = request.corpus
            row.grammar = None if lark is None else client.grammars.start(lark)
            if request.gate.kind != "none" or request.gate.num_readers is not None:
                gate.watch(row)
            rows.append(row)
    if request.baseline is not None and request.gate.scores_query:
        for suffix in request.suffixes:
            row = _row(request.baseline, suffix, request)
            row.params = SamplingParams(max_new_tokens=0)
            rows.append(row)
    return rows, gates


def _quoted_text(prefix: Prefix) -> QuotedText:
    """The shard without the instructions before it."""
    return QuotedText(prefix.token_ids[0 if prefix.parent is None else prefix.parent.num_tokens :])


def _row(prefix: Prefix, suffix: WorkerSuffix, request: RoundRequest) -> Row:
    row = Row(
        RowKind.SUFFIX, [*prefix.token_ids, *suffix.token_ids], request.params, order=request.order, prefix=prefix
    )
    if request.gate.scores_query:
        row.score_start = prefix.num_tokens + suffix.query_start
        row.score_stop = prefix.num_tokens + suffix.query_stop
    return row


def _reply(
    prefix: int, query: int, row: Row, result: RowResult, gate: Gate, baselines: Sequence[float | None]
) -> RowReply:
    baseline = baselines[query] if baselines else None
    relevance = None
    if result.mean_score is not None and baseline is not None:
        relevance = result.mean_score - baseline
    gated = result.finish_reason is FinishReason.GATED
    return RowReply(
        prefix_index=prefix,
        query_index=query,
        token_ids=result.new_token_ids,
        finish_reason=result.finish_reason,
        abstained=row in gate.abstained,
        chosen=row in gate.chosen or not gated,
        relevance=relevance,
    )
