"""Who gets pages, and when: waiting rows become live ones, the most urgent kind first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from antiphon.engine.errors import AntiphonError, CapacityError
from antiphon.engine.pages import PAGE_TOKENS, num_pages_for
from antiphon.engine.prefix_store import PrefixStore
from antiphon.scheduler.residency import Residency
from antiphon.scheduler.row import Row, RowKind
from antiphon.scheduler.waiting import Waiting


@dataclass(frozen=True)
class Kept:
    """What an owner's last row left: pages that hold `token_ids`."""

    pages: list[int]
    token_ids: list[int]


class _Outcome(Enum):
    READY = "ready"
    NO_ROOM = "no room"
    COMING = "coming"


class Admission:
    """Gives a row all the pages that it can come to need, or none; also what was kept for its owner.

    Rows over a corpus are admitted in the order of its sweep, as many as fit: a wave. What they take never evicts a
    prefix that other rows wait for, unless nothing runs otherwise."""

    def __init__(self, store: PrefixStore, waiting: Waiting, residency: Residency) -> None:
        self.kept: dict[object, Kept] = {}
        self._store = store
        self._waiting = waiting
        self._residency = residency

    def admit(self, live: dict[RowKind, list[Row]], fail: Callable[[Row, Exception], None]) -> None:
        """Moves waiting rows that get their pages to `live`; `fail` ends those whose prefix was released."""
        for kind in RowKind:
            while (row := self._waiting.head(kind)) is not None:
                idle = not any(live.values()) and not self._residency.is_fetching
                try:
                    outcome = self._take_pages(row, idle)
                except AntiphonError as error:
                    fail(row, error)
                    continue
                if outcome is _Outcome.NO_ROOM:
                    return  # a less urgent row must not take the pages that this one waits for
                if outcome is _Outcome.COMING:
                    break  # a less urgent one may run: it may be what reads the prefix again
                live[kind].append(self._waiting.pop(kind))
        self._residency.look_ahead()

    def take_kept(self, row: Row) -> None:
        """Gives the row what was kept for its owner. Where the owner never took its last row's result (it was cancelled
        just then) the tokens differ: the pages are given up, and full ones are found again by `match_cached`."""
        kept = self.kept.pop(row.owner, None)
        if kept is None:
            return
        num_tokens = len(kept.token_ids)
        if num_tokens < len(row.token_ids) and row.token_ids[:num_tokens] == kept.token_ids:
            row.pages, row.context_tokens, row.cached_tokens = kept.pages, num_tokens, num_tokens
        else:
            self._store.release(kept.pages)

    def keep(self, row: Row) -> None:
        """Moves the computed pages to the row's owner, and lets later prompts find the full ones."""
        num_pages = num_pages_for(row.context_tokens)
        self.kept[row.owner] = Kept(row.pages[:num_pages], row.token_ids[: row.context_tokens])
        self._store.insert_cached(row.token_ids[: row.context_tokens], row.pages[:num_pages])
        row.pages = row.pages[num_pages:]

    def drop_kept(self, owner: object) -> None:
        """Releases what was kept for `owner`."""
        if owner in self.kept:
            self._store.release(self.kept.pop(owner).pages)

    def make_room(self, held: list[Row]) -> bool:
        """Nothing is live and the first waiting row lacks pages: takes those of an idle conversation, of a row that a
        gate holds, or of a row that waits behind it. What they held is computed again. False if nobody has any."""
        waiting = list(self._waiting)
        if not waiting:
            return False
        if self.kept:
            self.drop_kept(next(iter(self.kept)))
            return True
        for row in (*reversed(held), *reversed(waiting[1:])):
            if row.pages:
                self._store.release(row.pages)
                row.pages, row.context_tokens, row.cached_tokens = [], 0, 0
                row.score_stop = row.score_stop if row in waiting else 0  # a held row has its scores already
                return True
        return False

    def _take_pages(self, row: Row, idle: bool) -> _Outcome:
        """Nothing is taken unless the row is ready. `idle`: nothing else can run before it."""
        held = list(row.pages)
        spared = self._spared(row, idle)
        try:
            if row.prefix is not None and not row.pages:
                if not self._store.is_resident(row.prefix):
                    self._residency.bring(row.prefix)
                    return _Outcome.COMING
                row.pages = self._store.fork(row.prefix, spared=spared)
                row.context_tokens = row.cached_tokens = row.prefix.num_tokens
            elif row.use_cached and not row.pages:
                row.pages = self._store.match_cached(row.token_ids)
                row.context_tokens = row.cached_tokens = len(row.pages) * PAGE_TOKENS
            missing = max(0, num_pages_for(row.max_tokens) - len(row.pages))
            spare = self._residency.spare_pages if row.kind is RowKind.READ else 0
            row.pages = row.pages + self._store.allocate(missing, spare=spare, spared=spared)
        except CapacityError:
            self._store.release(row.pages[len(held) :])
            row.pages = held
            if not held:
                row.context_tokens = row.cached_tokens = 0
            return _Outcome.NO_ROOM
        return _Outcome.READY

    def _spared(self, row: Row, idle: bool) -> Callable[[bytes], bool]:
        """Which movable prefixes must not make way for this row."""
        if row.restores is not None:
            return self._residency.sooner_than(row.restores)
        if not idle:
            return self._waiting.needs
        own = b"" if row.prefix is None else row.prefix.key
        return lambda key: key == own
