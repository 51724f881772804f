"""One step (step 5 of the reading path): the core loop, one thread for both models.

Take new work, pick a lane, run one batch of one model, retire what ended. Everything that touches rows, pages or
prefixes runs on this thread; others hand it functions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from antiphon.engine.errors import AbortedError
from antiphon.scheduler.lane import Lane

T = TypeVar("T")

# After this many steps of one lane, another lane that has work gets one, however urgent the first is.
_LANE_AGEING_STEPS = 8


class Core:
    """The loop over all lanes. `start` runs it on a thread of its own; tests may call `run_until_idle` instead."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self.lanes = dict(lanes)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for lane in self.lanes.values():
            lane.connect(self._inbox.put)
        self._thread: threading.Thread | None = None
        self._inbox_lock = threading.Lock()  # what is handed in is done or refused, also while the thread ends
        self._stopping = False
        self._fault: Exception | None = None
        self._last_lane: Lane | None = None
        self._steps_in_row = 0

    def start(self) -> None:
        """Runs the loop on a thread."""
        self._thread = threading.Thread(target=self._run, name="antiphon-core", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on the core's thread between two steps; its value or exception comes in the future."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # handed to the caller, who asked for it
                future.set_exception(error)

        with self._inbox_lock:
            if self._stopping:
                future.set_exception(self._closed_error())
            else:
                self._inbox.put(run)
        return future

    def run_until_idle(self) -> None:
        """Steps on the caller's thread until there is nothing to do, then checks that no page is lost."""
        while True:
            self._drain(wait=self._is_fetching() and not self._has_work())
            if not self._step() and self._inbox.empty() and not self._is_fetching():
                self.check_integrity()
                return

    def check_integrity(self) -> None:
        """Raises unless every page of every lane is accounted for."""
        for lane in self.lanes.values():
            lane.check_integrity()

    def close(self) -> None:
        """Aborts all rows and ends the thread; further calls fail."""
        self._inbox.put(self._refuse_calls)
        if self._thread is not None:
            self._thread.join()
        else:
            self._end()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._step() and self._inbox.empty():
                    self.check_integrity()
                self._drain(wait=not self._has_work())
        except Exception as error:  # a fault of our own
            self._fault = error
        self._end()

    def _refuse_calls(self) -> None:
        with self._inbox_lock:
            self._stopping = True

    def _end(self) -> None:
        """Does what was handed in before calls were refused, then ends every row: none may wait for a thread that is
        gone."""
        self._refuse_calls()
        self._drain()
        for lane in self.lanes.values():
            lane.close(self._closed_error())

    def _closed_error(self) -> AbortedError:
        return AbortedError(f"the engine is closed{f': {self._fault}' if self._fault else ''}")

    def _has_work(self) -> bool:
        return any(lane.has_work for lane in self.lanes.values())

    def _is_fetching(self) -> bool:
        return any(lane.residency.is_fetching for lane in self.lanes.values())

    def _drain(self, *, wait: bool = False) -> None:
        """Does what was handed in; with `wait`, blocks until there is something."""
        while True:
            try:
                work = self._inbox.get(block=wait)
            except queue.Empty:
                return
            work()
            wait = False

    def _step(self) -> bool:
        """One batch of the most urgent lane. Lanes age, so that a busy driver does not stop all reading."""
        ready = [lane for lane in self.lanes.values() if lane.has_work]
        if not ready:
            return False
        lane = min(ready, key=lambda ready_lane: ready_lane.urgency())
        if lane is self._last_lane and self._steps_in_row >= _LANE_AGEING_STEPS and len(ready) > 1:
            lane = next(other for other in ready if other is not lane)
        self._steps_in_row = self._steps_in_row + 1 if lane is self._last_lane else 1
        self._last_lane = lane
        lane.step()
        return True
