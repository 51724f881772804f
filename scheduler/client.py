"""`LaneClient`: the core's rows from asyncio. Reading prefixes, sessions and rounds are built on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from antiphon.engine.errors import AbortedError
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.prefix_store import Prefix
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
        self, token_ids: Sequence[int], parent: Prefix | None = None, *, pinned: bool = True
    ) -> RowResult:
        """See `read_prefixes`, for one."""
        return (await self.read_prefixes([token_ids], parent, pinned=pinned))[0]

    async def read_prefixes(
        self,
        token_lists: Sequence[Sequence[int]],
        parent: Prefix | None = None,
        *,
        pinned: bool = True,
        on_done: Callable[[int, RowResult], None] | None = None,
    ) -> list[RowResult]:
        """Declares prefixes: `parent`'s tokens followed by each of `token_lists`. Those that are kept already are not
        read again (`cached_tokens` says so). Each result's `prefix` has one user: release it with `release`."""
        before = parent.token_ids if parent is not None else ()
        wholes = [[*before, *token_ids] for token_ids in token_lists]
        params = SamplingParams(max_new_tokens=0)
        rows: list[Row] = []
        indices: list[int] = []
        results: dict[int, RowResult] = {}
        for index, known in enumerate(await self._find_and_use(wholes)):
            if known is None:
                rows.append(Row(RowKind.READ, wholes[index], params, prefix=parent, declare_pinned=pinned))
                indices.append(index)
                continue
            results[index] = _known_result(known)
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

    async def _find_and_use(self, token_lists: Sequence[Sequence[int]]) -> list[Prefix | None]:
        """The declared prefix of each, with one user more, where it is kept already."""

        def find() -> list[Prefix | None]:
            prefixes = [self.lane.store.find_declared(token_ids) for token_ids in token_lists]
            for prefix in prefixes:
                if prefix is not None:
                    self.lane.store.use(prefix)
            return prefixes

        found = self.core.call(find)
        try:
            return await asyncio.wrap_future(found)
        except asyncio.CancelledError:
            found.add_done_callback(self._release_found)
            raise

    def _release_found(self, found: Future[list[Prefix | None]]) -> None:
        if found.exception() is None:
            self.release([prefix for prefix in found.result() if prefix is not None])


def _known_result(prefix: Prefix) -> RowResult:
    return RowResult(
        token_ids=prefix.token_ids,
        new_token_ids=(),
        finish_reason=FinishReason.READ,
        mean_score=None,
        context_tokens=prefix.num_tokens,
        prefill_tokens=0,
        cached_tokens=prefix.num_tokens,
        prefix=prefix,
    )


def _reporter(index: int, on_done: Callable[[int, RowResult], None]) -> Callable[[asyncio.Future[RowResult]], None]:
    def report(future: asyncio.Future[RowResult]) -> None:
        if not future.cancelled() and future.exception() is None:
            on_done(index, future.result())

    return report
