"""Every page is free or held by the owners on the books; a failed request takes nothing; freed memory is poisoned."""

from __future__ import annotations

import pytest
import torch

from antiphon.engine.config import config_from_hf
from antiphon.engine.errors import AntiphonError, CapacityError
from antiphon.engine.pages import PAGE_TOKENS, KVCache, PagePool, num_pages_for
from antiphon.kernels.ops import KernelContext
from antiphon.kernels.registry import choose_kernels


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_hold_64_tokens(tokens: int, pages: int) -> None:
    assert num_pages_for(tokens) == pages


def test_consecutive_pages_are_preferred_and_scattered_ones_are_the_fallback() -> None:
    pool = PagePool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    assert pool.release([1, 3]) == [1, 3]
    assert pool.allocate(3) == [5, 6, 7]
    assert pool.allocate(2) == [1, 3]
    assert pool.num_free == 0
    pool.check_integrity([[0, 1, 2, 3, 4, 5, 6, 7]])


def test_a_run_before_the_cursor_is_found_when_none_is_left_behind_it() -> None:
    pool = PagePool(6)
    pool.allocate(5)
    pool.release([1, 2])
    assert pool.allocate(2) == [1, 2]


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(4)
    held = pool.allocate(2)
    with pytest.raises(CapacityError, match="3 asked for, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(0) == []
    pool.check_integrity([held])


def test_a_page_is_free_when_its_last_owner_gives_it_up() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.retain([1])
    assert pool.num_owners(1) == 2
    assert pool.release(pages) == [0]
    assert (pool.num_free, pool.num_owners(1)) == (1, 1)
    assert pool.release([1]) == [1]
    assert pool.num_free == 2


def test_free_pages_can_be_neither_released_nor_retained() -> None:
    pool = PagePool(2)
    for attempt in (pool.release, pool.retain):
        with pytest.raises(AntiphonError, match="page 1 is free"):
            attempt([1])
    assert pool.num_free == 2


def test_check_integrity_finds_a_lost_a_stolen_and_a_miscounted_page() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    for holders in ([[0]], [[0, 1, 2]], [[0, 1], [1]], []):
        with pytest.raises(AntiphonError, match="owners on the books"):
            pool.check_integrity(holders)
    pool._num_free = 2
    with pytest.raises(AntiphonError, match="2 held"):
        pool.check_integrity([pages])


SMALL = config_from_hf(
    {
        "model_type": "qwen2",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10,
    }
)


def small_cache(*, poison: bool, dtype: torch.dtype = torch.float32) -> KVCache:
    kernels = choose_kernels(KernelContext("cpu", torch.float32, torch.float32, dtype, 4), only="reference")
    return KVCache(SMALL, 3, dtype, kernels, poison=poison)


def test_pages_are_poisoned_from_the_start_and_again_when_freed() -> None:
    cache = small_cache(poison=True)
    assert cache.k.shape == (2, 1, 3 * PAGE_TOKENS, 4)
    assert cache.k.isnan().all() and cache.v.isnan().all()
    cache.k.fill_(1)
    cache.v.fill_(2)
    cache.poison_pages([1])
    middle = slice(PAGE_TOKENS, 2 * PAGE_TOKENS)
    assert cache.k[:, :, middle].isnan().all() and cache.v[:, :, middle].isnan().all()
    assert int(cache.k.isnan().sum()) == int(cache.v.isnan().sum()) == 2 * PAGE_TOKENS * 4


def test_without_poison_freed_pages_are_left_alone() -> None:
    cache = small_cache(poison=False)
    cache.k.fill_(1)
    cache.poison_pages([0, 1, 2])
    assert not cache.k.isnan().any()


def test_a_copied_page_has_keys_and_values_of_every_layer() -> None:
    cache = small_cache(poison=True)
    cache.k[:, :, :PAGE_TOKENS] = torch.rand(2, 1, PAGE_TOKENS, 4)
    cache.v[:, :, :PAGE_TOKENS] = torch.rand(2, 1, PAGE_TOKENS, 4)
    cache.copy_pages([0], [2])
    for pool in (cache.k, cache.v):
        assert torch.equal(pool[:, :, 2 * PAGE_TOKENS :], pool[:, :, :PAGE_TOKENS])
        assert pool[:, :, PAGE_TOKENS : 2 * PAGE_TOKENS].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_layer_is_a_contiguous_view_of_the_pool(dtype: torch.dtype) -> None:
    cache = small_cache(poison=True, dtype=dtype)
    for index in range(2):
        layer = cache.layer(index)
        assert layer.k.dtype == layer.v.dtype == dtype
        assert (layer.k_scale is None) == (layer.v_scale is None) == (dtype != torch.int8)
        for name in ("k", "v", "k_scale", "v_scale"):
            view, pool = getattr(layer, name), getattr(cache, name)
            assert view is None or (view.is_contiguous() and view.data_ptr() == pool[index].data_ptr())


def test_int8_pages_are_poisoned_by_their_scales_and_copied_with_them() -> None:
    cache = small_cache(poison=True, dtype=torch.int8)
    assert cache.k_scale is not None and cache.v_scale is not None
    assert cache.k_scale.shape == (2, 1, 3 * PAGE_TOKENS) and cache.k_scale.dtype == torch.float32
    assert cache.k_scale.isnan().all() and cache.v_scale.isnan().all()
    for seed, (pool, scale) in enumerate(((cache.k, cache.k_scale), (cache.v, cache.v_scale))):
        pool[:, :, :PAGE_TOKENS] = seed + 1
        scale[:, :, :PAGE_TOKENS] = torch.rand(2, 1, PAGE_TOKENS)
    cache.copy_pages([0], [2])
    for pool in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        assert torch.equal(pool[:, :, 2 * PAGE_TOKENS :], pool[:, :, :PAGE_TOKENS])
    cache.poison_pages([0])
    assert cache.k_scale[:, :, : 2 * PAGE_TOKENS].isnan().all()
    assert not cache.v_scale[:, :, 2 * PAGE_TOKENS :].isnan().any()


@pytest.mark.parametrize(("dtype", "vector_bytes"), [(torch.float32, 16), (torch.bfloat16, 8), (torch.int8, 4 + 4)])
def test_bytes_are_those_of_all_pools_scales_included(dtype: torch.dtype, vector_bytes: int) -> None:
    cache, config = small_cache(poison=False, dtype=dtype), SMALL
    assert KVCache.token_bytes(config, dtype) == 2 * 2 * vector_bytes
    assert cache.num_bytes == 3 * KVCache.page_bytes(config, dtype) == 3 * PAGE_TOKENS * 4 * vector_bytes
