"""`PagePool`: pages of keys and values, counted by reference. `KVCache`: the memory that the pages are places in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import AntiphonError, CapacityError
from antiphon.kernels.ops import KernelSet, LayerCache

PAGE_TOKENS = 64
_SCALE_BYTES = 4  # of a key or value vector in int8: a float32


def num_pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class PagePool:
    """Which pages are free, and how many owners each held page has.

    Consecutive pages are preferred: attention then reads them as one view.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_free = num_pages
        self._counts = [0] * num_pages
        self._cursor = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    def num_owners(self, page: int) -> int:
        """How many owners a page has; 0 is free."""
        return self._counts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Takes `num_pages` free pages, each with one owner; raises `CapacityError` and takes none if too few are."""
        if num_pages > self._num_free:
            raise CapacityError(f"kv pages: {num_pages} asked for, {self._num_free} of {self.num_pages} are free")
        pages = self._consecutive(num_pages) or self._scattered(num_pages)
        for page in pages:
            self._counts[page] = 1
        self._num_free -= num_pages
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds an owner to each page."""
        for page in pages:
            if self._counts[page] < 1:
                raise AntiphonError(f"kv pages: page {page} is free, it cannot get another owner")
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Takes an owner from each page; returns the pages that became free."""
        freed = []
        for page in pages:
            if self._counts[page] < 1:
                raise AntiphonError(f"kv pages: page {page} is free already")
            self._counts[page] -= 1
            if self._counts[page] == 0:
                freed.append(page)
        self._num_free += len(freed)
        return freed

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises unless `holders` (every owner's pages) account for every reference, and free + held = total."""
        expected = Counter(page for pages in holders for page in pages)
        for page, count in enumerate(self._counts):
            if count != expected.get(page, 0):
                raise AntiphonError(f"kv pages: page {page} has {count} owners on the books, {expected[page]} in use")
        held = sum(1 for count in self._counts if count)
        if held + self._num_free != self.num_pages:
            raise AntiphonError(f"kv pages: {held} held + {self._num_free} free are not {self.num_pages}")

    def _consecutive(self, num_pages: int) -> list[int] | None:
        """The first run of free pages from the cursor on (next fit), then from the start; None if there is none."""
        for first, last in ((self._cursor, self.num_pages), (0, self.num_pages)):
            length = 0
            for page in range(first, last):
                length = 0 if self._counts[page] else length + 1
                if length == num_pages:
                    self._cursor = page + 1
                    return list(range(page + 1 - num_pages, page + 1))
        return [] if num_pages == 0 else None

    def _scattered(self, num_pages: int) -> list[int]:
        free = (page for page in range(self.num_pages) if not self._counts[page])
        return [next(free) for _ in range(num_pages)]


class KVCache:
    """Keys and values of a pool's pages, `[layers, kv_heads, num_pages * PAGE_TOKENS, head_dim]` each, in float32,
    bfloat16 or int8; with int8 their scales, `[layers, kv_heads, num_pages * PAGE_TOKENS]` float32 (`ops.LayerCache`).

    Memory is taken from the system page by page as it is first written. With `poison`, freed pages are
    filled with NaN (with int8: their scales), so that reading one shows.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, dtype: torch.dtype, kernels: KernelSet, *, poison: bool = False
    ) -> None:
        shape = (config.num_layers, config.num_kv_heads, num_pages * PAGE_TOKENS, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype)
        self.v = torch.empty(shape, dtype=dtype)
        scaled = dtype == torch.int8
        self.k_scale = torch.empty(shape[:-1], dtype=torch.float32) if scaled else None
        self.v_scale = torch.empty(shape[:-1], dtype=torch.float32) if scaled else None
        self._copy_pages = kernels.copy_pages
        self._poison = poison
        if poison:
            self.poison_pages(range(num_pages))

    @staticmethod
    def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take over all layers, scales included."""
        return config.kv_bytes_per_token(dtype.itemsize, _SCALE_BYTES if dtype == torch.int8 else 0)

    @staticmethod
    def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one page of keys and values over all layers, scales included."""
        return PAGE_TOKENS * KVCache.token_bytes(config, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, scales included."""
        return sum(pool.nbytes for pool in self._pools())

    def layer(self, index: int) -> LayerCache:
        """One layer's keys and values, as views."""
        if self.k_scale is None or self.v_scale is None:
            return LayerCache(self.k[index], self.v[index])
        return LayerCache(self.k[index], self.v[index], self.k_scale[index], self.v_scale[index])

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copies whole pages, keys and values with their scales, in every layer."""
        for pool in self._pools():
            self._copy_pages(pool, PAGE_TOKENS, source, target)

    def copy_out(self, pages: Sequence[int], num_tokens: int) -> dict[str, Tensor]:
        """Contiguous copies of the first `num_tokens` tokens of these pages: `k` and `v`
        `[layers, kv_heads, num_tokens, head_dim]`, with int8 `k_scale` and `v_scale` without the last dimension.
        Safe on any thread while nobody writes to the pages."""
        copies = {}
        for name, pool in self._named_pools():
            copy = torch.empty((*pool.shape[:2], num_tokens, *pool.shape[3:]), dtype=pool.dtype)
            for start, stop, slot in _runs(pages, num_tokens):
                _raw(copy)[:, :, start:stop] = _raw(pool)[:, :, slot : slot + stop - start]
            copies[name] = copy
        return copies

    def copy_in(self, pages: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `copy_out`, bit for bit; raises `AntiphonError` where names, dtypes or shapes are others.
        Safe on any thread while nobody else reads or writes the pages."""
        num_tokens = tensors["k"].shape[2] if "k" in tensors else 0
        expected = {
            name: (pool.dtype, (*pool.shape[:2], num_tokens, *pool.shape[3:])) for name, pool in self._named_pools()
        }
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        if found != expected or num_pages_for(num_tokens) > len(pages):
            raise AntiphonError(f"kv pages: a state of {found} does not fit {len(pages)} pages of {expected}")
        for name, pool in self._named_pools():
            for start, stop, slot in _runs(pages, num_tokens):
                _raw(pool)[:, :, slot : slot + stop - start] = _raw(tensors[name])[:, :, start:stop]

    def poison_pages(self, pages: Iterable[int]) -> None:
        """Fills freed pages with NaN (only with `poison`)."""
        if self._poison:
            floats = [pool for pool in self._pools() if pool.is_floating_point()]
            for page in pages:
                for pool in floats:
                    pool[:, :, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = float("nan")

    def _named_pools(self) -> list[tuple[str, Tensor]]:
        named = (("k", self.k), ("v", self.v), ("k_scale", self.k_scale), ("v_scale", self.v_scale))
        return [(name, pool) for name, pool in named if pool is not None]

    def _pools(self) -> list[Tensor]:
        return [pool for _, pool in self._named_pools()]


def _runs(pages: Sequence[int], num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Spans of tokens (start, stop) whose slots follow each other, and the first slot of each."""
    start = 0
    while start < num_tokens:
        first = start // PAGE_TOKENS
        last = first + 1
        while last * PAGE_TOKENS < num_tokens and pages[last] == pages[last - 1] + 1:
            last += 1
        stop = min(num_tokens, last * PAGE_TOKENS)
        yield start, stop, pages[first] * PAGE_TOKENS
        start = stop


def _raw(tensor: Tensor) -> NDArray[np.generic]:
    """The same memory for numpy, which copies on the caller's thread alone (torch would wake a pool of its own)."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
