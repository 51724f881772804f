"""`Engine`: both models in one process behind one small interface; `ask`: one question, one call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from antiphon.assembly import Assembly, EngineOptions, WrapKernels, assemble
from antiphon.corpus import Corpus, read_corpus
from antiphon.document import Document
from antiphon.engine.errors import AntiphonError
from antiphon.events import EventSink, ModelLoaded, ignore_event
from antiphon.loaded_model import LoadedModel
from antiphon.methods.options import ParSerOptions
from antiphon.methods.parser import ParSer
from antiphon.results import Answer
from antiphon.saved_manifest import Manifest
from antiphon.saving import reading_note, saved_corpus
from antiphon.scheduler.session import Session
from antiphon.scheduler.trace import Trace, trace_lane

T = TypeVar("T")


class Engine:
    """Two models, one budget, one core. `async with Engine(options) as engine:` loads, runs and closes it.

    With `worker_only` no driver is loaded: the worker plays both roles (rounds without a method). `wrap_kernels` may
    put something around the chosen kernels: timers, for a profile.
    """

    def __init__(
        self,
        options: EngineOptions | None = None,
        on_event: EventSink = ignore_event,
        *,
        worker_only: bool = False,
        wrap_kernels: WrapKernels | None = None,
    ) -> None:
        self.options = options or EngineOptions()
        self.load_seconds = 0.0
        self._on_event = on_event
        self._roles = 1 if worker_only else 2
        self._wrap_kernels = wrap_kernels
        self._assembly: Assembly | None = None
        self.trace: Trace | None = None

    async def __aenter__(self) -> Engine:
        loop = asyncio.get_running_loop()

        def loaded(role: str, name: str, seconds: float) -> None:
            loop.call_soon_threadsafe(self._on_event, ModelLoaded(role, name, seconds))

        started = time.perf_counter()
        self.trace = None if self.options.trace is None else Trace(self.options.trace)
        try:
            self._assembly = await asyncio.to_thread(
                assemble, self.options, loaded, roles=self._roles, wrap_kernels=self._wrap_kernels
            )
        except BaseException:
            self.close()
            raise
        for lane in self._assembly.core.lanes.values():
            if self.trace is not None:
                trace_lane(self.trace, lane)
        self.load_seconds = time.perf_counter() - started
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def assembly(self) -> Assembly:
        """The running parts: core, models, ledger."""
        if self._assembly is None:
            raise AntiphonError("the engine is not open: use `async with Engine(...) as engine`")
        return self._assembly

    @property
    def worker(self) -> LoadedModel:
        """The model that reads shards."""
        return self.assembly.worker

    @property
    def driver(self) -> LoadedModel:
        """The model that reasons."""
        return self.assembly.driver

    def session(self, role: str = "driver") -> Session:
        """A new conversation with the driver, or with the worker."""
        return (self.driver if role == "driver" else self.worker).session()

    async def register(
        self,
        document: Document,
        *,
        shard_tokens: int,
        shard_overlap: int = 0,
        worker_instructions: str,
        on_event: EventSink = ignore_event,
        save: bool = False,
    ) -> Corpus:
        """Has the worker read a document, shard by shard; the corpus answers any number of rounds until released. With
        `save` every shard's state is on the disk when this returns (`TierError` where it could not be written)."""
        return await read_corpus(
            document,
            self.worker,
            self.driver,
            shard_tokens=shard_tokens,
            shard_overlap=shard_overlap,
            worker_instructions=worker_instructions,
            on_event=on_event,
            save=save,
        )

    def counters(self) -> dict[str, dict[str, float]]:
        """What was saved and what went wrong so far, by role (`scheduler/counters.py`)."""
        models = {"worker": self.worker, "driver": self.driver}
        return {role: model.client.lane.counters.as_dict() for role, model in models.items()}

    def close(self) -> None:
        """Ends the core: rows that are under way are aborted. The trace, if there is one, ends after it."""
        if self._assembly is not None:
            self._assembly.core.close()
            self._assembly = None
        if self.trace is not None:
            self.trace.close()


async def ask_async(
    paths: str | Path | Sequence[str | Path] | Document | Manifest,
    question: str,
    *,
    engine: EngineOptions | None = None,
    options: ParSerOptions | None = None,
    on_event: EventSink = ignore_event,
) -> Answer:
    """Reads the document and answers one question with ParSer, on an engine of its own. A saved corpus (`@NAME`, or its
    manifest) is not read again: it is asked with its own shards, and its own worker where no `engine` names one."""
    started = time.perf_counter()
    saved = _saved(paths)
    if saved is not None:
        engine = engine or EngineOptions(worker=saved.worker)
        options = replace(
            options or ParSerOptions(), shard_tokens=saved.shard_tokens, shard_overlap=saved.shard_overlap
        )
    document = _document(paths if saved is None else saved)
    async with Engine(engine, on_event) as running:
        answer = await ParSer(running, options).ask(document, question, on_event)
        answer.seconds.load = running.load_seconds
        answer.counters = running.counters()
        note = None if saved is None else reading_note(saved, running.worker.client.lane.store.fingerprint)
    notes = (note, None if running.trace is None else running.trace.problem)
    answer.notes += [note for note in notes if note is not None]
    answer.seconds.total = time.perf_counter() - started
    return answer


def ask(
    paths: str | Path | Sequence[str | Path] | Document | Manifest,
    question: str,
    *,
    engine: EngineOptions | None = None,
    options: ParSerOptions | None = None,
    on_event: EventSink = ignore_event,
) -> Answer:
    """`ask_async` for plain code; works inside a running event loop (a notebook) too."""
    return run_sync(ask_async(paths, question, engine=engine, options=options, on_event=on_event))


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, on a thread of its own where this one already runs a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # handed to the waiting caller
            failure.append(error)

    thread = threading.Thread(target=run, name="antiphon-ask")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _saved(paths: str | Path | Sequence[str | Path] | Document | Manifest) -> Manifest | None:
    if isinstance(paths, Document | Manifest):
        return paths if isinstance(paths, Manifest) else None
    return saved_corpus([str(path) for path in _as_list(paths)])


def _document(paths: str | Path | Sequence[str | Path] | Document | Manifest) -> Document:
    if isinstance(paths, Document | Manifest):
        return paths if isinstance(paths, Document) else paths.document
    return Document.from_paths(_as_list(paths))


def _as_list(paths: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [paths] if isinstance(paths, str | Path) else paths
