"""Rows that wait for pages: each kind in the order of arrival, rows over a corpus in the order of its sweep."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from antiphon.engine.eviction import NextUse
from antiphon.engine.prefix_store import Prefix
from antiphon.scheduler.row import Row, RowKind
from antiphon.scheduler.sweep import Sweeps


class Waiting:
    """Waiting rows by kind. A suffix row whose corpus is open leaves when the sweep comes to its shard; those of no
    corpus leave before, since what they need does not depend on where a sweep stands."""

    def __init__(self) -> None:
        self._queues: dict[RowKind, deque[Row]] = {kind: deque() for kind in RowKind}
        self._sweeps: Sweeps[Row] = Sweeps()

    def __iter__(self) -> Iterator[Row]:
        """All rows, the most urgent kind first, each kind in the order in which it leaves."""
        for kind in RowKind:
            yield from self._of(kind)

    def __bool__(self) -> bool:
        return any(self._queues.values()) or len(self._sweeps) > 0

    def open(self, corpus: Hashable, prefixes: Sequence[Prefix], *, alternates: bool) -> None:
        """From now on rows of this corpus leave in sweeps over its prefixes."""
        self._sweeps.open(corpus, [prefix.key for prefix in prefixes], alternates=alternates)

    def close(self, corpus: Hashable) -> None:
        """Ends a corpus's sweeps; rows that still wait for it leave in the order of arrival."""
        self._queues[RowKind.SUFFIX].extend(self._sweeps.close(corpus))

    def add(self, row: Row, *, first: bool = False) -> None:
        """A row that lacks pages; `first` puts it before the others of its kind."""
        if row.corpus in self._sweeps and row.prefix is not None:
            self._sweeps.add(row.corpus, row.prefix.key, row)
        elif first:
            self._queues[row.kind].appendleft(row)
        else:
            self._queues[row.kind].append(row)

    def remove(self, row: Row) -> bool:
        """Takes a row out; False where it does not wait."""
        if row in self._queues[row.kind]:
            self._queues[row.kind].remove(row)
            return True
        return self._sweeps.remove(row)

    def has(self, kind: RowKind) -> bool:
        """Whether a row of this kind waits."""
        return self.head(kind) is not None

    def head(self, kind: RowKind) -> Row | None:
        """The row of this kind that leaves next."""
        return next(self._of(kind), None)

    def pop(self, kind: RowKind) -> Row:
        """Takes out the row of this kind that leaves next."""
        queue = self._queues[kind]
        return self._sweeps.pop() if kind is RowKind.SUFFIX and not queue else queue.popleft()

    def upcoming(self, num_prefixes: int) -> list[Prefix]:
        """The first distinct prefixes that the sweeps come to."""
        found: dict[bytes, Prefix] = {}
        for row in self._sweeps:
            if len(found) == num_prefixes:
                break
            if row.prefix is not None:
                found.setdefault(row.prefix.key, row.prefix)
        return list(found.values())

    def next_use(self, key: bytes) -> NextUse:
        """When a prefix is used next, as far as the sweeps know."""
        return self._sweeps.next_use(key)

    def needs(self, key: bytes) -> bool:
        """Whether a row over this prefix waits in a sweep."""
        return self._sweeps.waits(key)

    def _of(self, kind: RowKind) -> Iterator[Row]:
        yield from self._queues[kind]
        if kind is RowKind.SUFFIX:
            yield from self._sweeps
