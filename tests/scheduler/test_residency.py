"""Corpora larger than the pool: the same tokens as where all fits, in sweeps, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny_models as tiny
from tiny_models import TinyEngine, prompt
from tiny_rows import GREEDY, new_tokens, read, suffix_row
from transformers import PreTrainedModel

from antiphon.engine.prefix_store import Keep, Prefix
from antiphon.scheduler.row import Row

NUM_SHARDS = 8
INSTRUCTIONS = prompt(70, seed=99)
SHARDS = [prompt(100 + 13 * index, seed=index) for index in range(NUM_SHARDS)]
QUERIES = [prompt(9, seed=50), prompt(5, seed=51)]


def read_shards(engine: TinyEngine) -> list[Prefix]:
    parent = read(engine, INSTRUCTIONS)[0]
    rows = [read_again_row([*INSTRUCTIONS, *ids], parent) for ids in SHARDS]
    engine.run(rows)
    prefixes = [row.future.result().prefix for row in rows]
    engine.lane.open_corpus("corpus", [prefix for prefix in prefixes if prefix is not None])
    return [prefix for prefix in prefixes if prefix is not None]


def read_again_row(ids: list[int], parent: Prefix) -> Row:
    from antiphon.engine.sampling_params import SamplingParams
    from antiphon.scheduler.row import RowKind

    return Row(RowKind.READ, ids, SamplingParams(max_new_tokens=0), prefix=parent, keep=Keep.MOVABLE)


def ask(engine: TinyEngine, prefixes: Sequence[Prefix]) -> list[tuple[int, ...]]:
    rows = [suffix_row(query, prefix, GREEDY, corpus="corpus") for query in QUERIES for prefix in prefixes]
    return new_tokens(engine, rows)


@pytest.mark.parametrize("num_pages", [12, 16, 20])
def test_a_corpus_larger_than_the_pool_gives_the_same_tokens(model: PreTrainedModel, num_pages: int) -> None:
    whole = tiny.tiny_engine(model)
    expected = ask(whole, read_shards(whole))
    assert whole.lane.counters.shards_evicted == 0
    engine = tiny.tiny_engine(model, num_pages=num_pages)
    prefixes = read_shards(engine)
    for round_ in range(4):
        assert ask(engine, prefixes) == expected
        print(num_pages, round_, engine.lane.counters)
    for prefix in prefixes:
        engine.lane.store.disuse(prefix)
    engine.lane.check_integrity()
