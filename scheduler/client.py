"""`LaneClient`: the core's rows from asyncio. Reading prefixes, sessions and rounds are built on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from antiphon.engine.errors import AbortedError
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.prefix_store import Keep, Prefix
from antiphon.engine.sampling_params import SamplingParams
from antiphon.scheduler.core import Core
from antiphon.scheduler.lane import Lane
from antiphon.scheduler.row import FinishReason, Row, RowKind, RowResult

T = TypeVar("T")


class LaneClient:
    """What callers may do with one model's lane; safe from any thread and any event loop."""

    def __init__(self, core: Core, lane: Lane, grammars: GrammarCompiler) -> None:
        self.core = core
        self.lane = lane
        self.grammars = grammars

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work` on the core's thread."""
        return await asyncio.wrap_future(self.core.call(work))

    async def run_rows(
        self, rows: Sequence[Row], on_done: Callable[[int, RowResult], None] | None = None
    ) -> list[RowResult]:
        """Submits rows and waits for all; the first failure aborts the rest and is raised, as is a cancellation.
        `on_done(index, result)` is called on this event loop as rows end."""

        def submit() -> None:
            for row in rows:
                self.lane.submit(row)

        submitted = self.core.call(submit)
        if submitted.done() and isinstance(submitted.exception(), AbortedError):
            submitted.result()  # the engine is closed: it never saw the rows, and nobody would end them
        futures = [asyncio.wrap_future(row.future) for row in rows]
        if on_done is not None:
            for index, future in enumerate(futures):
                future.add_done_callback(_reporter(index, on_done))
        try:
            await asyncio.wrap_future(submitted)
            return list(await asyncio.gather(*futures))
        except BaseException:
            # A cancelled wait says nothing of its rows: they have ended when the abort has run.
            aborted = self.core.call(lambda: self.lane.abort(rows))
            await asyncio.wait([asyncio.wrap_future(aborted)])
            raise

    async def read_prefix(
        self, token_ids: Sequence[int], parent: Prefix | None = None, *, keep: Keep = Keep.PINNED
    ) -> RowResult:
        """See `read_prefixes`, for one."""
        return (await self.read_prefixes([token_ids], parent, keep=keep))[0]

    async def read_prefixes(
        self,
        token_lists: Sequence[Sequence[int]],
        parent: Prefix | None = None,
        *,
        keep: Keep = Keep.PINNED,
        save: bool = False,
        on_done: Callable[[int, RowResult], None] | None = None,
    ) -> list[RowResult]:
        """Declares prefixes: `parent`'s tokens followed by each of `token_lists`. Those that are kept already, in the
        pool or (movable ones) in a tier, are not read again (`cached_tokens` says so). With `save` the states of those
        that are read are put into the saved tier. Each result's `prefix` has one user: release it with `release`."""
        before = parent.token_ids if parent is not None else ()
        wholes = [[*before, *token_ids] for token_ids in token_lists]
        params = SamplingParams(max_new_tokens=0)
        rows: list[Row] = []
        indices: list[int] = []
        results: dict[int, RowResult] = {}
        for index, known in enumerate(await self._find_and_use(wholes, parent, keep, save)):
            if known is None:
                rows.append(Row(RowKind.READ, wholes[index], params, prefix=parent, keep=keep, save=save))
                indices.append(index)
                continue
            results[index] = known
            if on_done is not None:
                on_done(index, results[index])

        def report(position: int, result: RowResult) -> None:
            if on_done is not None:
                on_done(indices[position], result)

        try:
            read = await self.run_rows(rows, report)
        except BaseException:
            self._release_read(rows, results)
            raise
        results.update(zip(indices, read, strict=True))
        return [results[index] for index in range(len(token_lists))]

    def release(self, prefixes: Sequence[Prefix]) -> None:
        """Gives up one use of each prefix."""
        for prefix in prefixes:
            self.core.call(partial(self.lane.store.disuse, prefix))

    def _release_read(self, rows: Sequence[Row], known: dict[int, RowResult]) -> None:
        """After a failure: what was read or found meanwhile has no user any more."""
        done = [row.future.result() for row in rows if row.future.done() and row.future.exception() is None]
        self.release([result.prefix for result in (*done, *known.values()) if result.prefix is not None])

    async def _find_and_use(
        self, token_lists: Sequence[Sequence[int]], parent: Prefix | None, keep: Keep, save: bool
    ) -> list[RowResult | None]:
        """The declared prefix of each, with one user more, where it is kept already."""

        def find() -> list[RowResult | None]:
            return [self._find(token_ids, parent, keep, save) for token_ids in token_lists]

        found = self.core.call(find)
        try:
            return await asyncio.wrap_future(found)
        except asyncio.CancelledError:
            found.add_done_callback(self._release_found)
            raise

    def _find(self, token_ids: Sequence[int], parent: Prefix | None, keep: Keep, save: bool) -> RowResult | None:
        """On the core's thread. What is to be saved counts as kept only where it is saved, or is in the pool."""
        store, residency = self.lane.store, self.lane.residency
        prefix = store.find_declared(token_ids)
        if prefix is not None and save and not store.is_resident(prefix) and not residency.is_saved(prefix.key):
            return None
        if prefix is not None:
            store.use(prefix)
        elif keep is Keep.MOVABLE and residency.knows(store.chain_key(token_ids)):
            prefix = store.declare(token_ids, (), keep=keep, parent=parent)
        else:
            return None
        return _known_result(prefix, residency.save(prefix) if save else None)

    def _release_found(self, found: Future[list[RowResult | None]]) -> None:
        if found.exception() is None:
            known = [result for result in found.result() if result is not None]
            self.release([result.prefix for result in known if result.prefix is not None])


def _known_result(prefix: Prefix, saved: Future[None] | None) -> RowResult:
    return RowResult(
        token_ids=prefix.token_ids,
        new_token_ids=(),
        finish_reason=FinishReason.READ,
        mean_score=None,
        context_tokens=prefix.num_tokens,
        prefill_tokens=0,
        cached_tokens=prefix.num_tokens,
        prefix=prefix,
        saved=saved,
    )


def _reporter(index: int, on_done: Callable[[int, RowResult], None]) -> Callable[[asyncio.Future[RowResult]], None]:
    def report(future: asyncio.Future[RowResult]) -> None:
        if not future.cancelled() and future.exception() is None:
            on_done(index, future.result())

    return report
