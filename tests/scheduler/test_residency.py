"""Corpora larger than the pool: the same tokens as where all fits, however shards come back, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from tiny_models import TinyEngine, prompt
from tiny_rows import read, suffix_row
from transformers import PreTrainedModel

from antiphon.engine.batch import Phase
from antiphon.engine.disk_tier import DiskTier
from antiphon.engine.errors import AbortedError, AntiphonError
from antiphon.engine.host_tier import HostTier
from antiphon.engine.prefix_store import Keep, Prefix
from antiphon.engine.runner import PendingStep
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.lane import Eviction
from antiphon.scheduler.residency import Residency, Tiers
from antiphon.scheduler.row import Row, RowKind

NUM_SHARDS = 8
INSTRUCTIONS = prompt(70, seed=99)
SHARDS = [prompt(100 + 13 * index, seed=index) for index in range(NUM_SHARDS)]
QUERIES = [prompt(9, seed=50), prompt(5, seed=51)]
SMALL_POOL = 16  # pages; all shards take 26

Reply = tuple[tuple[int, ...], float | None]  # new tokens, and the mean log-probability of the query's


def shard_row(ids: list[int], parent: Prefix, **parts: Any) -> Row:
    tokens = [*parent.token_ids, *ids]
    return Row(RowKind.READ, tokens, SamplingParams(max_new_tokens=0), prefix=parent, keep=Keep.MOVABLE, **parts)


def read_shards(engine: TinyEngine, shards: Sequence[list[int]] = SHARDS, **parts: Any) -> list[Prefix]:
    parent = read(engine, INSTRUCTIONS)[0]
    rows = [shard_row(ids, parent, **parts) for ids in shards]
    engine.run(rows)
    prefixes = [prefix for row in rows if (prefix := row.future.result().prefix) is not None]
    engine.lane.open_corpus("corpus", prefixes)
    return prefixes


def query_row(query: list[int], prefix: Prefix, corpus: str = "corpus") -> Row:
    """A row that scores its query's tokens, so that any bit of its prefix shows."""
    start = prefix.num_tokens
    return suffix_row(query, prefix, corpus=corpus, score_start=start + 1, score_stop=start + len(query))


def query_rows(prefixes: Sequence[Prefix]) -> list[Row]:
    return [query_row(query, prefix) for query in QUERIES for prefix in prefixes]


def replies(rows: Sequence[Row]) -> list[Reply]:
    results = [row.future.result() for row in rows]
    return [(result.new_token_ids, result.mean_score) for result in results]


def ask(engine: TinyEngine, prefixes: Sequence[Prefix]) -> list[Reply]:
    rows = query_rows(prefixes)
    engine.run(rows)
    return replies(rows)


def release(engine: TinyEngine, prefixes: Sequence[Prefix]) -> None:
    """Gives up all shards, and their tiers' states with them."""
    for prefix in prefixes:
        engine.lane.store.disuse(prefix)
    engine.lane.check_integrity()


def disk(folder: Path, limit_bytes: int = 1 << 30, *, temporary: bool = True) -> DiskTier:
    return DiskTier(folder, limit_bytes, temporary=temporary)


@pytest.fixture(autouse=True)
def fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model reads a tiny shard sooner than any file is opened: the choice has a test of its own."""
    monkeypatch.setattr(Residency, "_reading_is_cheaper", lambda residency, prefix: False)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[Reply]:
    engine = tiny.tiny_engine(model)
    found = ask(engine, read_shards(engine))
    assert engine.lane.counters.shards_evicted == 0
    assert len(set(found)) > NUM_SHARDS, "rows must differ for this to show anything"
    return found


@pytest.mark.parametrize("eviction", ["sweep", "lru"])
@pytest.mark.parametrize("num_pages", [12, SMALL_POOL, 20])
def test_shards_that_left_are_read_again(
    model: PreTrainedModel, expected: list[Reply], num_pages: int, eviction: Eviction
) -> None:
    engine = tiny.tiny_engine(model, num_pages=num_pages, eviction=eviction)
    prefixes = read_shards(engine)
    for _ in range(3):
        assert ask(engine, prefixes) == expected
    counters = engine.lane.counters
    assert counters.shards_read_again > 0
    assert counters.tokens_read_again >= counters.shards_read_again * min(map(len, SHARDS))
    release(engine, prefixes)


def test_sweeps_read_fewer_shards_again_than_a_scan_under_least_recently_used(model: PreTrainedModel) -> None:
    counted = {}
    for eviction in ("sweep", "lru"):
        engine = tiny.tiny_engine(model, num_pages=20, eviction=eviction)  # type: ignore[arg-type]
        prefixes = read_shards(engine)
        for _ in range(4):
            ask(engine, prefixes)
        counted[eviction] = engine.lane.counters.shards_read_again
    assert counted["lru"] >= 4 * NUM_SHARDS, "a scan hits nothing"
    assert counted["sweep"] <= 0.75 * counted["lru"]


def test_shards_come_back_from_the_disk_and_are_never_read_again(
    model: PreTrainedModel, expected: list[Reply], tmp_path: Path
) -> None:
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL, tiers=Tiers([disk(tmp_path)]))
    prefixes = read_shards(engine)
    for _ in range(3):
        assert ask(engine, prefixes) == expected
    counters = engine.lane.counters
    assert (counters.shards_read_again, counters.tier_failures) == (0, 0)
    assert counters.shards_fetched > NUM_SHARDS
    assert counters.bytes_fetched > 0
    release(engine, prefixes)
    engine.core.close()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_host_memory_has_no_room_for_goes_to_the_disk(
    model: PreTrainedModel, expected: list[Reply], tmp_path: Path
) -> None:
    """Host memory without int8 is exact; it holds two or three of these states."""
    host = HostTier(400_000)
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL, tiers=Tiers([host, disk(tmp_path)]))
    prefixes = read_shards(engine)
    for _ in range(3):
        assert ask(engine, prefixes) == expected
    assert host.num_bytes > 0
    assert list(tmp_path.rglob("*.safetensors"))
    assert engine.lane.counters.shards_read_again == 0
    engine.core.close()


@pytest.mark.parametrize("reading_is_cheaper", [True, False])
def test_what_is_cheaper_to_read_than_to_fetch_is_read_again(
    model: PreTrainedModel,
    expected: list[Reply],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reading_is_cheaper: bool,
) -> None:
    """By measured rates; here a reading takes next to no time, or for ever."""
    monkeypatch.undo()
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL, tiers=Tiers([disk(tmp_path)]))
    residency = engine.lane.residency
    monkeypatch.setattr(residency, "measured_read", lambda num_tokens, seconds: None)
    prefixes = read_shards(engine)
    residency._seconds_per_token = 1e-9 if reading_is_cheaper else 1e9
    for _ in range(3):
        assert ask(engine, prefixes) == expected
    counters = engine.lane.counters
    assert counters.shards_fetched > 0, "one has to be fetched for its rate to be known"
    assert (counters.shards_cheaper_to_read > NUM_SHARDS) == reading_is_cheaper
    assert (counters.shards_read_again > 0) == reading_is_cheaper
    engine.core.close()


def test_a_damaged_state_is_read_again_and_told(model: PreTrainedModel, expected: list[Reply], tmp_path: Path) -> None:
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL, tiers=Tiers([disk(tmp_path)]))
    prefixes = read_shards(engine)
    assert ask(engine, prefixes) == expected
    files = list(tmp_path.rglob("*.safetensors"))
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert ask(engine, prefixes) == expected
    assert engine.lane.counters.tier_failures > 0
    assert engine.lane.counters.shards_read_again > 0
    release(engine, prefixes)
    engine.core.close()


def test_a_full_disk_is_told_and_its_shards_are_read_again(
    model: PreTrainedModel, expected: list[Reply], tmp_path: Path
) -> None:
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL, tiers=Tiers([disk(tmp_path, 300_000)]))
    prefixes = read_shards(engine)
    for _ in range(2):
        assert ask(engine, prefixes) == expected
    counters = engine.lane.counters
    assert min(counters.tier_failures, counters.shards_read_again, counters.shards_fetched) > 0
    release(engine, prefixes)
    engine.core.close()


def test_saved_shards_are_not_read_by_another_engine(
    model: PreTrainedModel, expected: list[Reply], tmp_path: Path
) -> None:
    saver = tiny.tiny_engine(model, tiers=Tiers(saved=disk(tmp_path, temporary=False)))
    read_shards(saver, save=True)
    saver.core.close()
    assert len(list(tmp_path.rglob("*.safetensors"))) == NUM_SHARDS
    engine = tiny.tiny_engine(model, tiers=Tiers(saved=disk(tmp_path, temporary=False)))
    parent = read(engine, INSTRUCTIONS)[0]
    store = engine.lane.store
    known = [[*INSTRUCTIONS, *ids] for ids in SHARDS]
    assert all(engine.lane.residency.knows(store.chain_key(ids)) for ids in known)
    assert not engine.lane.residency.knows(store.chain_key(known[0][:-1]))
    prefixes = [store.declare(ids, (), keep=Keep.MOVABLE, parent=parent) for ids in known]
    engine.lane.open_corpus("corpus", prefixes)
    assert ask(engine, prefixes) == expected
    assert engine.lane.counters.shards_fetched == NUM_SHARDS
    assert engine.lane.counters.shards_read_again == 0
    engine.core.close()
    assert len(list(tmp_path.rglob("*.safetensors"))) == NUM_SHARDS, "what is saved outlives the engine"


def test_a_state_of_other_bits_would_be_seen(model: PreTrainedModel, expected: list[Reply], tmp_path: Path) -> None:
    """The negative control: host memory as int8 is lossy, and these comparisons show it."""
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL, tiers=Tiers([HostTier(1 << 30, int8=True)]))
    prefixes = read_shards(engine)
    engine.lane.residency._putter.submit(lambda: None).result()  # until then states come from where they wait, exact
    engine.core.run_until_idle()
    found = ask(engine, prefixes)
    assert engine.lane.counters.shards_fetched > 0
    assert found != expected
    engine.core.close()


@pytest.mark.parametrize("num_steps", range(0, 24, 3))
def test_an_abort_while_shards_are_on_their_way_loses_no_page(
    model: PreTrainedModel, tmp_path: Path, num_steps: int
) -> None:
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL, tiers=Tiers([disk(tmp_path)]))
    prefixes = read_shards(engine)
    rows = query_rows(prefixes)
    for row in rows:
        engine.lane.submit(row)
    for _ in range(num_steps):
        engine.lane.step()
        engine.lane.check_integrity()
    engine.lane.abort(rows)
    release(engine, prefixes)
    engine.core.run_until_idle()
    assert all(row.future.exception() is None or isinstance(row.future.exception(), AbortedError) for row in rows)
    assert engine.lane.store.pool.num_free == SMALL_POOL - 2, "only the instructions are left"
    engine.core.close()


def test_a_shard_that_cannot_be_read_again_fails_its_own_rows_alone(
    model: PreTrainedModel, expected: list[Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.tiny_engine(model, num_pages=SMALL_POOL)
    prefixes = read_shards(engine)
    launch = engine.lane.runner.launch

    def failing(batch: Any) -> PendingStep:
        if batch.phase is Phase.READ and tuple(batch.token_ids[-20:].tolist()) == broken.token_ids[-20:]:
            raise AntiphonError("no kernel for this shard")
        return launch(batch)

    ask(engine, prefixes)
    absent = next(index for index, prefix in enumerate(prefixes) if not engine.lane.store.is_resident(prefix))
    broken = prefixes[absent]
    monkeypatch.setattr(engine.lane.runner, "launch", failing)
    rows = query_rows(prefixes)
    engine.run(rows)
    failed = [index for index, row in enumerate(rows) if row.future.exception() is not None]
    assert failed == [absent, absent + NUM_SHARDS]
    for index, row in enumerate(rows):
        if index not in failed:
            assert replies([row]) == [expected[index]]


def test_two_corpora_that_do_not_fit_together_take_turns(model: PreTrainedModel) -> None:
    whole = tiny.tiny_engine(model)
    small = tiny.tiny_engine(model, num_pages=SMALL_POOL)
    found = []
    for engine in (whole, small):
        parent = read(engine, INSTRUCTIONS)[0]
        corpora = {}
        for name, shards in (("a", SHARDS[:4]), ("b", SHARDS[4:])):
            rows = [shard_row(ids, parent) for ids in shards]
            engine.run(rows)
            corpora[name] = [prefix for row in rows if (prefix := row.future.result().prefix) is not None]
            engine.lane.open_corpus(name, corpora[name])
        rows = [
            query_row(query, prefix, name)
            for query in QUERIES
            for name, prefixes in corpora.items()
            for prefix in prefixes
        ]
        engine.run(rows)
        found.append(replies(rows))
        engine.lane.close_corpus("a")
        again = query_row(QUERIES[0], corpora["a"][0], "a")
        engine.run([again])
        assert replies([again]) == found[-1][:1]
    assert found[0] == found[1]
