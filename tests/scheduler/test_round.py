"""A round is every prefix × every query: the same replies in any order and pool, and no prefix computed again."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import tiny_models as tiny
from tiny_models import TinyEngine, prompt, running_client
from transformers import PreTrainedModel

from antiphon.engine.chat import WorkerSuffix
from antiphon.engine.errors import InputError
from antiphon.engine.prefix_store import Prefix
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.gate import GateOptions
from antiphon.scheduler.round import RoundRequest, RoundResult, _build_rows, run_round
from antiphon.scheduler.row import FinishReason, Row, RowKind

T = TypeVar("T")

TOKENIZER = tiny.tiny_tokenizer()
REPLY = 'start: "Unknown" | "{" /[a-z]{2,4}/ "}"'
ABSTAIN = (TOKENIZER.encode("U")[0],)
INSTRUCTIONS = prompt(70)
SHARDS = [prompt(length, seed=7) for length in (1, 57, 58, 59, 64, 130)]
QUERIES = [WorkerSuffix(tuple(prompt(length, seed=8)), 1, length - 2) for length in (9, 12)]
SAMPLED = SamplingParams(max_new_tokens=12, temperature=2.0, seed=4)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def read(client: LaneClient, shards: Sequence[list[int]]) -> tuple[Prefix, list[Prefix]]:
    parent = (await client.read_prefix(INSTRUCTIONS)).prefix
    assert parent is not None
    reads = await client.read_prefixes(shards, parent)
    return parent, [result.prefix for result in reads if result.prefix is not None]


def request(prefixes: Sequence[Prefix], gate: GateOptions, baseline: Prefix | None = None) -> RoundRequest:
    return RoundRequest(prefixes, QUERIES, SAMPLED, gate, [REPLY] * len(prefixes), ABSTAIN, baseline)


def scatter(
    model: PreTrainedModel,
    gate: GateOptions,
    *,
    shards: Sequence[list[int]] = SHARDS,
    num_pages: int = 64,
    rounds: int = 1,
    **parts: Any,
) -> list[RoundResult]:
    engine = tiny.tiny_engine(model, num_pages=num_pages, **parts)

    async def all_rounds(client: LaneClient) -> list[RoundResult]:
        parent, prefixes = await read(client, shards)
        results = [await run_round(client, request(prefixes, gate, parent)) for _ in range(rounds)]
        client.release([parent, *prefixes])
        await client.call(engine.core.check_integrity)
        assert engine.lane.store.pool.num_free == num_pages
        return results

    with running_client(engine) as client:
        return run(all_rounds(client))


def replies(result: RoundResult) -> list[Any]:
    """Replies without what may differ in its last bits."""
    return [replace(reply, relevance=None) for reply in result.replies]


@pytest.fixture(scope="module")
def usual(model: PreTrainedModel) -> RoundResult:
    return scatter(model, GateOptions("first-token"))[0]


def test_replies_come_query_by_query_and_abstaining_rows_decode_nothing(usual: RoundResult) -> None:
    places = [(reply.query_index, reply.prefix_index) for reply in usual.replies]
    assert places == [(query, prefix) for query in range(2) for prefix in range(6)]
    assert {reply.abstained for reply in usual.replies} == {True, False}
    for reply in usual.replies:
        text = TOKENIZER.decode(reply.token_ids)
        if reply.abstained:
            assert (text, reply.finish_reason, reply.chosen) == ("", FinishReason.GATED, False)
        else:
            assert text.startswith("{") and text.endswith("}") and reply.finish_reason is FinishReason.STOP
    assert usual.decode_tokens == sum(len(reply.token_ids) for reply in usual.replies)


def test_every_reply_is_what_its_row_says_alone(model: PreTrainedModel, usual: RoundResult) -> None:
    """Cold: the whole prompt in one row on a new engine, its random draws included."""
    engine = tiny.tiny_engine(model)
    with running_client(engine) as client:
        for reply in usual.replies:
            ids = [*INSTRUCTIONS, *SHARDS[reply.prefix_index], *QUERIES[reply.query_index].token_ids]
            row = Row(RowKind.SUFFIX, ids, SAMPLED, grammar=client.grammars.start(REPLY))
            result = run(client.run_rows([row]))[0]
            text = TOKENIZER.decode(result.new_token_ids)
            assert text == ("Unknown" if reply.abstained else TOKENIZER.decode(reply.token_ids))


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
def test_any_order_of_shards_gives_the_same_replies(
    model: PreTrainedModel, usual: RoundResult, order: list[int]
) -> None:
    other = scatter(model, GateOptions("first-token"), shards=[SHARDS[index] for index in order])[0]
    by_place = {(reply.query_index, reply.prefix_index): reply for reply in usual.replies}
    for reply in other.replies:
        expected = by_place[reply.query_index, order[reply.prefix_index]]
        assert replace(reply, prefix_index=expected.prefix_index, relevance=expected.relevance) == expected


@pytest.mark.parametrize("gate", [GateOptions("first-token"), GateOptions("likelihood", 2), GateOptions("both", 3)])
@pytest.mark.parametrize(("num_pages", "step_tokens"), [(15, 96), (17, 10), (64, 4096)])
def test_any_wave_size_gives_the_same_replies(
    model: PreTrainedModel, gate: GateOptions, num_pages: int, step_tokens: int
) -> None:
    """The prefixes hold 13 pages: 2 or 4 more let one row or a few run at a time."""
    usual = scatter(model, gate)[0]
    small = scatter(model, gate, num_pages=num_pages, step_tokens=step_tokens)[0]
    assert replies(small) == replies(usual)
    for found, expected in zip(small.replies, usual.replies, strict=True):
        assert found.relevance == pytest.approx(expected.relevance, abs=1e-4)


def test_every_round_computes_suffixes_alone_and_says_the_same(model: PreTrainedModel) -> None:
    first, second = scatter(model, GateOptions("first-token"), rounds=2)
    prefix_tokens = sum(len(INSTRUCTIONS) + len(shard) for shard in SHARDS)
    for result in (first, second):
        assert result.cached_tokens == 2 * prefix_tokens
        assert result.prefill_tokens == 6 * (9 + 12)
    assert first.replies == second.replies


@pytest.mark.parametrize(("num_pages", "gate"), [(64, "none"), (15, "none"), (64, "likelihood")])
def test_prefill_lasts_until_the_last_first_token_and_decoding_is_the_rest(
    model: PreTrainedModel, num_pages: int, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, in waves, and where a gate holds rows. The clock goes one second on each time that it is read: at the
    start, at each of the 12 first tokens and at the end."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    options = GateOptions(gate, None if gate == "none" else 2)
    result = scatter(model, options, num_pages=num_pages)[0]
    num_baselines = len(QUERIES) if options.scores_query else 0
    assert (result.prefill_seconds, result.decode_seconds) == (12 + num_baselines, 1)
    assert result.seconds == result.prefill_seconds + result.decode_seconds


def test_the_likelihood_gate_lets_the_likeliest_on_and_measures_all_against_the_baseline(
    model: PreTrainedModel,
) -> None:
    result = scatter(model, GateOptions("likelihood", 2))[0]
    for query in range(2):
        own = [reply for reply in result.replies if reply.query_index == query]
        ranked = sorted(own, key=lambda reply: -(reply.relevance or 0.0))
        assert {reply.prefix_index for reply in own if reply.chosen} == {reply.prefix_index for reply in ranked[:2]}
        assert all(bool(reply.token_ids) == reply.chosen for reply in own)
        assert all(reply.relevance is not None for reply in own)
    assert result.prefill_tokens == 7 * (9 + 12)


def test_the_baseline_measured_against_itself_is_no_likelier(model: PreTrainedModel) -> None:
    engine = tiny.tiny_engine(model)

    async def scattered(client: LaneClient) -> RoundResult:
        parent, _ = await read(client, [])
        return await run_round(client, request([parent], GateOptions("likelihood", 1), parent))

    with running_client(engine) as client:
        result = run(scattered(client))
    assert [reply.relevance for reply in result.replies] == pytest.approx([0.0, 0.0], abs=1e-4)


def test_chosen_rows_without_decoding_are_not_reported_as_ended(model: PreTrainedModel) -> None:
    """A second reader decodes them: only the others have ended with this round."""
    reported: list[tuple[int, int, bool]] = []

    async def scattered(client: LaneClient) -> RoundResult:
        parent, prefixes = await read(client, SHARDS)
        gate = GateOptions("likelihood", 2, readers_decode=False)
        return await run_round(client, request(prefixes, gate, parent), lambda *row: reported.append(row))

    with running_client(tiny.tiny_engine(model)) as client:
        result = run(scattered(client))
    assert result.decode_tokens == 0
    assert len(reported) == 12
    for prefix, query, gated in reported:
        assert result.replies[query * 6 + prefix].chosen != gated


def test_a_document_without_shards_is_a_round_without_replies(model: PreTrainedModel) -> None:
    for gate in (GateOptions("first-token"), GateOptions("likelihood", 2)):
        result = scatter(model, gate, shards=[])[0]
        assert (result.replies, result.cached_tokens, result.decode_tokens) == ((), 0, 0)


def test_a_round_that_fails_frees_every_row(model: PreTrainedModel) -> None:
    """A broken grammar fails the round before a row is made; the next round runs."""
    engine = tiny.tiny_engine(model)

    async def scattered(client: LaneClient, engine: TinyEngine) -> None:
        _, prefixes = await read(client, SHARDS[:2])
        good = request(prefixes, GateOptions("first-token"))
        with pytest.raises(InputError, match="grammar: "):
            await run_round(client, replace(good, grammars=[REPLY, "start: ["]))
        assert len((await run_round(client, good)).replies) == 4

    with running_client(engine) as client:
        run(scattered(client, engine))


def test_replies_with_drafts_are_those_without(model: PreTrainedModel, usual: RoundResult) -> None:
    without = scatter(model, GateOptions("first-token"), speculation=False)[0]
    assert without.replies == usual.replies


def test_rows_quote_their_shard_alone_and_share_its_index(model: PreTrainedModel) -> None:
    async def quoted(client: LaneClient) -> list[Any]:
        parent, prefixes = await read(client, SHARDS)
        asked = request(prefixes, GateOptions("none"))
        rows, _ = await client.call(lambda: _build_rows(client, asked))
        client.release([parent, *prefixes])
        return [row.quotes for row in rows]

    with running_client(tiny.tiny_engine(model)) as client:
        texts = run(quoted(client))
    assert [list(text.token_ids) for text in texts] == SHARDS * len(QUERIES)
    assert texts[: len(SHARDS)] == texts[len(SHARDS) :]
