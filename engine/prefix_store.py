"""What was kept (step 6 of the reading path): declared prefixes, and everything else page by page.

A *declared* prefix is known to come back: it is kept until it is released. Where not all fit the pool, the pages of
movable ones are taken in the policy's order, and brought back from a lower tier or by reading again
(`scheduler/residency.py`). Everything else (chat histories, driver turns) is kept page by page under a chain of hashes
and evicted least recently used.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from antiphon.engine.errors import AntiphonError, CapacityError
from antiphon.engine.eviction import EvictionPolicy, LeastRecentlyUsed
from antiphon.engine.pages import PAGE_TOKENS, KVCache, PagePool, num_pages_for
from antiphon.engine.tiers import PrefixState


class Keep(Enum):
    """When a declared prefix gives up its pages."""

    PINNED = "pinned"  # when its last user gives it up
    MOVABLE = "movable"  # as pinned; while it is used they may also be taken, and brought back when it is wanted
    CACHED = "cached"  # when they are wanted and it has no user


@dataclass(frozen=True, eq=False)
class Prefix:
    """A declared prefix: all its tokens from position 0. Its first full pages are its parent's, where it has one. The
    last page may be partial: rows never write to it, a fork gets a copy of it."""

    token_ids: tuple[int, ...]
    key: bytes
    parent: Prefix | None = None

    @property
    def num_tokens(self) -> int:
        """Length from position 0, parents included."""
        return len(self.token_ids)

    @property
    def num_shared_pages(self) -> int:
        """Pages that it shares with its parent."""
        return 0 if self.parent is None else self.parent.num_tokens // PAGE_TOKENS


@dataclass
class _CachedPage:
    """A page of the page-wise cache: its 64 tokens (compared on a hit) and the place in the pool."""

    token_ids: tuple[int, ...]
    page: int


@dataclass
class _Declared:
    """A declared prefix; without pages it is absent from the pool. A locked one is not taken."""

    prefix: Prefix
    keep: Keep
    pages: tuple[int, ...]
    num_users: int = 1
    num_locks: int = 0


@dataclass
class PrefixStore:
    """Maps tokens to pages that hold their keys and values. `fingerprint` is all that determines their
    bits beside the tokens (model, weight epoch, adapter, dtypes of activations, weights and cache), `salt` the tenant:
    pages are found again only under the same. `policy` orders the movable prefixes whose pages are wanted; `on_leave`
    is told of each before its pages are free, `on_drop` of each key that is forgotten."""

    pool: PagePool
    cache: KVCache
    fingerprint: str
    salt: str = ""
    policy: EvictionPolicy[bytes] = field(default_factory=LeastRecentlyUsed)
    on_leave: Callable[[Prefix], None] = lambda prefix: None
    on_drop: Callable[[bytes], None] = lambda key: None
    _declared: OrderedDict[bytes, _Declared] = field(default_factory=OrderedDict)
    _cached: OrderedDict[bytes, _CachedPage] = field(default_factory=OrderedDict)

    def allocate(
        self, num_pages: int, *, spare: int = 0, spared: Callable[[bytes], bool] = lambda key: False
    ) -> list[int]:
        """Pages for a new owner; evicts what nobody uses, least recently used first, then takes movable prefixes'
        pages, as far as needed to leave `spare` more free, but none of those that `spared(key)` names. Raises
        `CapacityError` and evicts nothing where there would not be `num_pages`."""
        missing = num_pages - self.pool.num_free
        if missing + spare > 0:
            movable = self._movable(spared)
            evictable = self._num_evictable(movable) if missing > 0 else 0
            if missing > evictable:
                raise CapacityError(
                    f"kv pages: {num_pages} asked for, {self.pool.num_free} of {self.pool.num_pages} are free and "
                    f"{evictable} can be evicted"
                )
            self._evict(missing + spare, movable)
        return self.pool.allocate(num_pages)

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one owner's pages."""
        self.cache.poison_pages(self.pool.release(pages))

    def fork(self, prefix: Prefix, *, spared: Callable[[bytes], bool] = lambda key: False) -> list[int]:
        """A block table that continues `prefix`: full pages shared, a copy of a partial last page (new owner's).
        Raises `AntiphonError` for a prefix that was released or is not in the pool, `CapacityError` (nothing taken) for
        want of a page; `spared` as in `allocate`."""
        entry = self._entry(prefix)
        if not entry.pages:
            raise AntiphonError(f"prefix of {prefix.num_tokens} tokens is not in the pool, it must be brought first")
        self.policy.used(prefix.key)
        num_full = prefix.num_tokens // PAGE_TOKENS
        shared = list(entry.pages[:num_full])
        self.pool.retain(shared)
        if num_full == len(entry.pages):
            return shared
        entry.num_locks += 1  # the page that is copied must not be evicted to make room for its copy
        try:
            own = self.allocate(1, spared=spared)
        except CapacityError:
            self.release(shared)
            raise
        finally:
            entry.num_locks -= 1
        self.cache.copy_pages([entry.pages[-1]], own)
        return shared + own

    def find_declared(self, token_ids: Sequence[int]) -> Prefix | None:
        """The declared prefix of exactly these tokens, if it is there."""
        found = self._declared.get(self.chain_key(token_ids))
        if found is None or found.prefix.token_ids != tuple(token_ids):
            return None
        return found.prefix

    def declare(
        self, token_ids: Sequence[int], pages: Sequence[int], *, keep: Keep, parent: Prefix | None = None
    ) -> Prefix:
        """Takes over `pages`, which hold all of `token_ids`, as a declared prefix with one user. With no pages it is
        absent from the pool: to be brought from a tier."""
        key = self.chain_key(token_ids)
        known = self._declared.get(key)
        if known is not None:
            if known.prefix.token_ids != tuple(token_ids):
                raise AntiphonError(f"prefix of {len(token_ids)} tokens: another one has the same hash")
            known.num_users += 1
            self._place(known, pages)
            return known.prefix
        prefix = Prefix(tuple(token_ids), key, parent)
        self._declared[key] = _Declared(prefix, keep, tuple(pages))
        self.policy.used(key)
        return prefix

    def is_resident(self, prefix: Prefix) -> bool:
        """Whether the prefix has its pages; raises `AntiphonError` where it was released."""
        return bool(self._entry(prefix).pages)

    def is_declared(self, prefix: Prefix) -> bool:
        """Whether the prefix has not been released."""
        entry = self._declared.get(prefix.key)
        return entry is not None and entry.prefix is prefix

    def make_room(self, prefix: Prefix, *, spare: int, spared: Callable[[bytes], bool]) -> list[int]:
        """Pages for an absent prefix: those that it shares with its parent, and new ones for the rest; the new ones are
        `[prefix.num_shared_pages:]`. Errors, `spare` and `spared` as in `allocate`."""
        shared: list[int] = []
        if prefix.parent is not None:
            shared = list(self._entry(prefix.parent).pages[: prefix.num_shared_pages])
            if len(shared) < prefix.num_shared_pages:
                raise AntiphonError(f"prefix of {prefix.num_tokens} tokens: its parent is not in the pool")
        own = self.allocate(num_pages_for(prefix.num_tokens) - len(shared), spare=spare, spared=spared)
        self.pool.retain(shared)
        return shared + own

    def restore(self, prefix: Prefix, pages: Sequence[int]) -> None:
        """Takes over `pages` for a prefix that was absent; gives them back where it came otherwise or was released."""
        if self.is_declared(prefix):
            self._place(self._declared[prefix.key], pages)
        else:
            self.release(pages)

    def copy_state(self, prefix: Prefix) -> PrefixState:
        """A copy of what the prefix does not share with its parent; it must be in the pool."""
        pages = self._entry(prefix).pages[prefix.num_shared_pages :]
        first_token = prefix.num_shared_pages * PAGE_TOKENS
        tensors = self.cache.copy_out(pages, prefix.num_tokens - first_token)
        return PrefixState(prefix.key, prefix.token_ids, first_token, **tensors)

    def use(self, prefix: Prefix) -> None:
        """One user more: only a movable one's pages can be taken now."""
        entry = self._entry(prefix)
        entry.num_users += 1
        self._declared.move_to_end(prefix.key)
        self.policy.used(prefix.key)

    def disuse(self, prefix: Prefix) -> None:
        """One user less. A prefix without users is dropped; a cached one stays until its pages are wanted."""
        entry = self._entry(prefix)
        if entry.num_users < 1:
            raise AntiphonError(f"prefix of {prefix.num_tokens} tokens has no user that could give it up")
        entry.num_users -= 1
        if entry.num_users == 0 and entry.keep is not Keep.CACHED:
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
        self._evict(self.pool.num_pages, [])

    def holders(self) -> list[Sequence[int]]:
        """The store's own references, for `check_integrity`."""
        return [
            *(entry.pages for entry in self._declared.values()),
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

    def _place(self, entry: _Declared, pages: Sequence[int]) -> None:
        if entry.pages:
            self.release(pages)
        else:
            entry.pages = tuple(pages)
            self.policy.used(entry.prefix.key)

    def _drop(self, key: bytes) -> None:
        self.policy.forget(key)
        self.release(self._declared.pop(key).pages)
        self.on_drop(key)

    def _unused(self) -> list[_Declared]:
        return [entry for entry in self._declared.values() if entry.num_users == 0 and not entry.num_locks]

    def _movable(self, spared: Callable[[bytes], bool]) -> list[_Declared]:
        """Movable prefixes in the pool whose own pages no row has, less the spared ones."""
        return [
            entry
            for key, entry in self._declared.items()
            if entry.keep is Keep.MOVABLE
            and entry.pages
            and not entry.num_locks
            and all(self.pool.num_owners(page) == 1 for page in entry.pages[entry.prefix.num_shared_pages :])
            and not spared(key)
        ]

    def _num_evictable(self, movable: Sequence[_Declared]) -> int:
        """Pages that only what may be evicted holds, these movable prefixes among it."""
        references = Counter(entry.page for entry in self._cached.values())
        for declared in (*self._unused(), *movable):
            references.update(declared.pages)
        return sum(1 for page, count in references.items() if self.pool.num_owners(page) == count)

    def _evict(self, num_pages: int, movable: Sequence[_Declared]) -> None:
        """Frees that many pages, as far as it can: unused prefixes first, then cached pages, but none that a live row
        holds as well, then these movable prefixes in the policy's order."""
        target = min(self.pool.num_pages, self.pool.num_free + num_pages)
        for entry in self._unused():
            if self.pool.num_free >= target:
                return
            self._drop(entry.prefix.key)
        for key in [key for key, entry in self._cached.items() if self.pool.num_owners(entry.page) == 1]:
            if self.pool.num_free >= target:
                return
            self.release([self._cached.pop(key).page])
        if self.pool.num_free >= target:
            return
        for key in self.policy.order(entry.prefix.key for entry in movable):
            if self.pool.num_free >= target:
                return
            self._take(self._declared[key])

    def _take(self, entry: _Declared) -> None:
        self.on_leave(entry.prefix)
        pages, entry.pages = entry.pages, ()
        self.release(pages)


def _link(key: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(key + np.asarray(token_ids, dtype=np.int64).tobytes()).digest()
