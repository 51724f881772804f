"""What was kept is found again under the same tokens alone; exact pages, exact numbers of owners."""

from __future__ import annotations

import pytest
import tiny_models as tiny
import torch
from tiny_models import prompt

from antiphon.engine import prefix_store
from antiphon.engine.errors import AntiphonError, CapacityError
from antiphon.engine.pages import PAGE_TOKENS
from antiphon.engine.prefix_store import Keep, PrefixStore


@pytest.fixture
def store() -> PrefixStore:
    return tiny.tiny_engine(tiny.random_hf_model("qwen3"), num_pages=8).lane.store


def owners(store: PrefixStore) -> list[int]:
    return [store.pool.num_owners(page) for page in range(store.pool.num_pages)]


def fill(store: PrefixStore, pages: list[int]) -> None:
    for page in pages:
        span = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        store.cache.k[:, :, span], store.cache.v[:, :, span] = float(page), -float(page)


def marks(store: PrefixStore, page: int) -> set[float]:
    return set(store.cache.k[:, :, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].unique().tolist())


def check(store: PrefixStore, *held: list[int]) -> None:
    store.pool.check_integrity([*held, *store.holders()])


def test_a_fork_shares_full_pages_and_copies_the_partial_one_alone(store: PrefixStore) -> None:
    pages = store.allocate(3)
    fill(store, pages)
    prefix = store.declare(prompt(130), pages, keep=Keep.PINNED)
    table = store.fork(prefix)
    assert table == [0, 1, 3]
    assert owners(store) == [2, 2, 1, 1, 0, 0, 0, 0]
    assert marks(store, 3) == {2.0}
    assert float(store.cache.v[0, 0, 3 * PAGE_TOKENS, 0]) == -2.0
    check(store, table)
    store.release(table)
    assert owners(store) == [1, 1, 1, 0, 0, 0, 0, 0]
    assert store.cache.k[:, :, 3 * PAGE_TOKENS : 4 * PAGE_TOKENS].isnan().all()


def test_a_fork_of_full_pages_takes_no_page(store: PrefixStore) -> None:
    prefix = store.declare(prompt(128), store.allocate(2), keep=Keep.PINNED)
    assert store.fork(prefix) == [0, 1]
    assert owners(store) == [2, 2, 0, 0, 0, 0, 0, 0]


def test_a_fork_without_a_page_for_its_copy_takes_nothing(store: PrefixStore) -> None:
    prefix = store.declare(prompt(65), store.allocate(2), keep=Keep.PINNED)
    rest = store.allocate(6)
    with pytest.raises(CapacityError):
        store.fork(prefix)
    assert owners(store) == [1] * 8
    check(store, rest)


def test_a_fork_never_evicts_the_page_that_it_copies(store: PrefixStore) -> None:
    """The prefix is cached and unused: it is all that could be evicted to make room for its own copy."""
    prefix = store.declare(prompt(65), store.allocate(2), keep=Keep.CACHED)
    store.disuse(prefix)
    rest = store.allocate(6)
    with pytest.raises(CapacityError):
        store.fork(prefix)
    assert store.find_declared(prompt(65)) is prefix
    check(store, rest)


def test_a_released_prefix_can_be_neither_forked_nor_used(store: PrefixStore) -> None:
    prefix = store.declare(prompt(65), store.allocate(2), keep=Keep.PINNED)
    store.disuse(prefix)
    store.declare(prompt(65, seed=1), store.allocate(2), keep=Keep.PINNED)
    for attempt in (store.fork, store.use, store.disuse):
        with pytest.raises(AntiphonError, match="was released"):
            attempt(prefix)
    check(store)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 130])
def test_a_declared_prefix_is_found_by_all_its_tokens_and_no_others(store: PrefixStore, length: int) -> None:
    ids = prompt(length)
    prefix = store.declare(ids, store.allocate(-(-length // PAGE_TOKENS)), keep=Keep.PINNED)
    assert store.find_declared(ids) is prefix
    assert store.find_declared([*ids[:-1], (ids[-1] + 1) % tiny.VOCABULARY]) is None
    assert store.find_declared(ids[:-1]) is None
    assert store.find_declared([*ids, 0]) is None


def test_a_prefix_read_twice_at_once_is_kept_once(store: PrefixStore) -> None:
    first = store.declare(prompt(65), store.allocate(2), keep=Keep.PINNED)
    assert store.declare(prompt(65), store.allocate(2), keep=Keep.PINNED) is first
    assert store.pool.num_free == 6
    store.disuse(first)
    assert store.find_declared(prompt(65)) is first
    store.disuse(first)
    assert store.find_declared(prompt(65)) is None
    assert store.pool.num_free == 8


def test_a_use_can_be_given_up_once_only(store: PrefixStore) -> None:
    prefix = store.declare(prompt(1), store.allocate(1), keep=Keep.CACHED)
    store.disuse(prefix)
    with pytest.raises(AntiphonError, match="has no user"):
        store.disuse(prefix)


def test_cached_prefixes_stay_without_users_and_are_evicted_least_recently_used_first(store: PrefixStore) -> None:
    prefixes = [store.declare(prompt(128, seed=seed), store.allocate(2), keep=Keep.CACHED) for seed in range(4)]
    for prefix in prefixes[:3]:
        store.disuse(prefix)
    store.use(prefixes[0])
    store.disuse(prefixes[0])
    assert store.pool.num_free == 0
    assert store.allocate(1) == [2]
    kept = [store.find_declared(prompt(128, seed=seed)) is not None for seed in range(4)]
    assert kept == [True, False, True, True]
    store.allocate(3)
    kept = [store.find_declared(prompt(128, seed=seed)) is not None for seed in range(4)]
    assert kept == [True, False, False, True]


def test_a_request_that_eviction_cannot_serve_evicts_nothing(store: PrefixStore) -> None:
    store.disuse(store.declare(prompt(64), store.allocate(1), keep=Keep.CACHED))
    store.declare(prompt(64, seed=1), store.allocate(5), keep=Keep.PINNED)
    with pytest.raises(CapacityError, match="4 asked for, 2 of 8 are free and 1 can be evicted"):
        store.allocate(4)
    assert store.find_declared(prompt(64)) is not None
    check(store)


def test_cached_pages_are_found_by_their_longest_common_beginning(store: PrefixStore) -> None:
    ids = prompt(200)
    pages = store.allocate(4)
    store.insert_cached(ids, pages)
    assert owners(store) == [2, 2, 2, 1, 0, 0, 0, 0]
    assert store.match_cached([*ids[:128], *prompt(60, seed=1)]) == pages[:2]
    assert store.match_cached(ids[:63]) == []
    assert store.match_cached([*prompt(64, seed=2), *ids[64:]]) == []
    assert owners(store) == [3, 3, 2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("length", "found"), [(64, 0), (65, 1), (128, 1), (129, 2)])
def test_one_token_is_always_left_to_compute(store: PrefixStore, length: int, found: int) -> None:
    ids = prompt(200)
    store.insert_cached(ids, store.allocate(3))
    assert len(store.match_cached(ids[:length])) == found


def test_cached_pages_are_evicted_tail_first_and_the_least_recently_used_chain_first(store: PrefixStore) -> None:
    """Without its head a chain is never found again: evicting from the tail keeps the rest of use."""
    for seed in range(2):
        pages = store.allocate(3)
        store.insert_cached(prompt(192, seed=seed), pages)
        store.release(pages)
    store.release(store.match_cached([*prompt(192, seed=0), 0]))
    store.allocate(4)
    assert len(store.match_cached([*prompt(192, seed=0), 0])) == 3
    assert store.match_cached([*prompt(192, seed=1), 0]) == [3]


def test_pages_that_a_live_row_holds_are_not_evicted_in_vain(store: PrefixStore) -> None:
    live = store.allocate(2)
    store.insert_cached(prompt(128), live)
    idle = store.allocate(2)
    store.insert_cached(prompt(128, seed=1), idle)
    store.release(idle)
    rest = store.allocate(6)
    assert sorted(rest) == [2, 3, 4, 5, 6, 7]
    assert store.match_cached([*prompt(128), 0]) == live
    with pytest.raises(CapacityError):
        store.allocate(1)


def test_a_hit_compares_tokens_not_hashes_alone(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "_link", lambda key, token_ids: b"the same for all")
    pages = store.allocate(2)
    store.insert_cached(prompt(64), pages[:1])
    assert store.match_cached([*prompt(64, seed=1), 0]) == []
    assert store.match_cached([*prompt(64), 0]) == [0]
    store.declare(prompt(64), pages[1:], keep=Keep.PINNED)
    assert store.find_declared(prompt(64, seed=1)) is None
    with pytest.raises(AntiphonError, match="same hash"):
        store.declare(prompt(64, seed=1), store.allocate(1), keep=Keep.PINNED)


@pytest.mark.parametrize("changed", [{"fingerprint": "another model"}, {"salt": "another tenant"}])
def test_another_model_or_tenant_has_other_keys(store: PrefixStore, changed: dict[str, str]) -> None:
    names = {"fingerprint": store.fingerprint, "salt": store.salt} | changed
    other = PrefixStore(store.pool, store.cache, **names)
    assert other.chain_key(prompt(65)) != store.chain_key(prompt(65))
    assert PrefixStore(store.pool, store.cache, store.fingerprint).chain_key(prompt(65)) == store.chain_key(prompt(65))


def test_clear_cached_frees_all_that_nobody_uses(store: PrefixStore) -> None:
    pages = store.allocate(2)
    store.insert_cached(prompt(128), pages)
    store.release(pages)
    store.disuse(store.declare(prompt(3), store.allocate(1), keep=Keep.CACHED))
    used = store.declare(prompt(4), store.allocate(1), keep=Keep.CACHED)
    store.clear_cached()
    assert store.pool.num_free == 7
    assert store.find_declared(prompt(4)) is used
    assert torch.isnan(store.cache.k[:, :, : 3 * PAGE_TOKENS]).all()
