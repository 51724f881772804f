"""What was kept (step 6 of the reading path): declared prefixes, pinned, and everything else page by page.

A *declared* prefix is known to come back: its pages are held until it is released. Everything else (chat histories,
driver turns) is kept page by page under a chain of hashes and evicted least recently used.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.engine.errors import AntiphonError, CapacityError
from antiphon.engine.pages import PAGE_TOKENS, KVCache, PagePool


@dataclass(frozen=True, eq=False)
class Prefix:
    """A declared prefix: all its tokens from position 0, and the pages that hold them. The last page may be partial:
    rows never write to it, a fork gets a copy of it."""

    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    key: bytes

    @property
    def num_tokens(self) -> int:
        """Length from position 0, parents included."""
        return len(self.token_ids)


@dataclass
class _CachedPage:
    """A page of the page-wise cache: its 64 tokens (compared on a hit) and the place in the pool."""

    token_ids: tuple[int, ...]
    page: int


@dataclass
class _Declared:
    prefix: Prefix
    num_users: int = 0
    pinned: bool = True


@dataclass
class PrefixStore:
    """Maps tokens to pages that hold their keys and values. `fingerprint` is all that determines their
    bits beside the tokens (model, weight epoch, adapter, dtypes of activations, weights and cache), `salt` the tenant:
    pages are found again only under the same."""

    pool: PagePool
    cache: KVCache
    fingerprint: str
    salt: str = ""
    _declared: OrderedDict[bytes, _Declared] = field(default_factory=OrderedDict)
    _cached: OrderedDict[bytes, _CachedPage] = field(default_factory=OrderedDict)

    def allocate(self, num_pages: int) -> list[int]:
        """Pages for a new owner; evicts what is cached and unpinned, least recently used first, as far as needed.
        Raises `CapacityError` and evicts nothing where that would not be enough."""
        missing = num_pages - self.pool.num_free
        if missing > 0:
            if missing > self._num_evictable():
                raise CapacityError(
                    f"kv pages: {num_pages} asked for, {self.pool.num_free} of {self.pool.num_pages} are free and "
                    f"{self._num_evictable()} can be evicted"
                )
            self._evict(missing)
        return self.pool.allocate(num_pages)

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one owner's pages."""
        self.cache.poison_pages(self.pool.release(pages))

    def fork(self, prefix: Prefix) -> list[int]:
        """A block table that continues `prefix`: full pages shared, a copy of a partial last page (new owner's).
        Raises `AntiphonError` for a prefix that was released, `CapacityError` (nothing taken) for want of a page."""
        entry = self._entry(prefix)
        num_full = prefix.num_tokens // PAGE_TOKENS
        shared = list(prefix.pages[:num_full])
        self.pool.retain(shared)
        if num_full == len(prefix.pages):
            return shared
        entry.num_users += 1  # the page that is copied must not be evicted to make room for its copy
        try:
            own = self.allocate(1)
        except CapacityError:
            self.release(shared)
            raise
        finally:
            entry.num_users -= 1
        self.cache.copy_pages([prefix.pages[-1]], own)
        return shared + own

    def find_declared(self, token_ids: Sequence[int]) -> Prefix | None:
        """The declared prefix of exactly these tokens, if it is there."""
        found = self._declared.get(self.chain_key(token_ids))
        if found is None or found.prefix.token_ids != tuple(token_ids):
            return None
        return found.prefix

    def declare(self, token_ids: Sequence[int], pages: Sequence[int], *, pinned: bool) -> Prefix:
        """Takes over `pages`, which hold all of `token_ids`, as a declared prefix with one user."""
        key = self.chain_key(token_ids)
        known = self._declared.get(key)
        if known is not None:
            if known.prefix.token_ids != tuple(token_ids):
                raise AntiphonError(f"prefix of {len(token_ids)} tokens: another one has the same hash")
            self.release(pages)
            known.num_users += 1
            return known.prefix
        prefix = Prefix(tuple(token_ids), tuple(pages), key)
        self._declared[key] = _Declared(prefix, num_users=1, pinned=pinned)
        return prefix

    def use(self, prefix: Prefix) -> None:
        """One user more: a used prefix is not evicted."""
        entry = self._entry(prefix)
        entry.num_users += 1
        self._declared.move_to_end(prefix.key)

    def disuse(self, prefix: Prefix) -> None:
        """One user less. A pinned prefix without users is dropped; an unpinned one stays until its pages are wanted."""
        entry = self._entry(prefix)
        if entry.num_users < 1:
            raise AntiphonError(f"prefix of {prefix.num_tokens} tokens has no user that could give it up")
        entry.num_users -= 1
        if entry.num_users == 0 and entry.pinned:
            self._drop(prefix.key)

    def match_cached(self, token_ids: Sequence[int]) -> list[int]:
        """Pages of the longest cached run of full pages that `token_ids` starts with; the caller becomes an owner.
        At least one token is always left to compute, since logits come from computing."""
        pages: list[int] = []
        keys: list[bytes] = []
        for key, chunk in self._chunks(token_ids[:-1]):
            entry = self._cached.get(key)
            if entry is None or entry.token_ids != chunk:
                break
            keys.append(key)
            pages.append(entry.page)
        for key in reversed(keys):  # tails go first: without its head a chain is never found again
            self._cached.move_to_end(key)
        self.pool.retain(pages)
        return pages

    def insert_cached(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps the full pages of `token_ids` (whose keys and values `pages` hold) until they are evicted."""
        for (key, chunk), page in reversed(list(zip(self._chunks(token_ids), pages, strict=False))):
            if key in self._cached:
                self._cached.move_to_end(key)
                continue
            self.pool.retain([page])
            self._cached[key] = _CachedPage(chunk, page)

    def chain_key(self, token_ids: Sequence[int]) -> bytes:
        """SHA-256 chain over all of `token_ids`, a partial last page included."""
        key = self._root_key()
        for start in range(0, len(token_ids), PAGE_TOKENS):
            key = _link(key, token_ids[start : start + PAGE_TOKENS])
        return key

    def clear_cached(self) -> None:
        """Evicts all that nobody uses."""
        self._evict(self.pool.num_pages)

    def holders(self) -> list[Sequence[int]]:
        """The store's own references, for `check_integrity`."""
        return [
            *(entry.prefix.pages for entry in self._declared.values()),
            *((entry.page,) for entry in self._cached.values()),
        ]

    def _root_key(self) -> bytes:
        return hashlib.sha256(f"{self.fingerprint}|{PAGE_TOKENS}|{self.salt}".encode()).digest()

    def _chunks(self, token_ids: Sequence[int]) -> list[tuple[bytes, tuple[int, ...]]]:
        chunks, key = [], self._root_key()
        for start in range(0, len(token_ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
            chunk = tuple(token_ids[start : start + PAGE_TOKENS])
            key = _link(key, chunk)
            chunks.append((key, chunk))
        return chunks

    def _entry(self, prefix: Prefix) -> _Declared:
        entry = self._declared.get(prefix.key)
        if entry is None or entry.prefix is not prefix:
            raise AntiphonError(f"prefix of {prefix.num_tokens} tokens was released, it cannot be used")
        return entry

    def _drop(self, key: bytes) -> None:
        self.release(self._declared.pop(key).prefix.pages)

    def _num_evictable(self) -> int:
        """Pages that only unused entries hold."""
        references = Counter(entry.page for entry in self._cached.values())
        for declared in self._declared.values():
            if declared.num_users == 0:
                references.update(declared.prefix.pages)
        return sum(1 for page, count in references.items() if self.pool.num_owners(page) == count)

    def _evict(self, num_pages: int) -> None:
        target = min(self.pool.num_pages, self.pool.num_free + num_pages)
        """Frees that many pages: unused prefixes first, then cached pages, but none that a live row holds as well."""
        for key in [key for key, entry in self._declared.items() if entry.num_users == 0]:
            if self.pool.num_free >= target:
                return
            self._drop(key)
        for key in [key for key, entry in self._cached.items() if self.pool.num_owners(entry.page) == 1]:
            if self.pool.num_free >= target:
                return
            self.release([self._cached.pop(key).page])


def _link(key: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(key + np.asarray(token_ids, dtype=np.int64).tobytes()).digest()
