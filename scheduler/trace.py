"""What ran when, as a file that Perfetto and chrome://tracing open: spans on tracks, and counters.

The format is Chrome's trace events, in an array (one event a line): the document "Trace Event Format" says that its
closing bracket may be missing, so that a process which dies leaves a file that can be read.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from antiphon.engine.batch import Phase
from antiphon.engine.errors import InputError
from antiphon.scheduler.lane import Lane
from antiphon.scheduler.plan import Piece

MAX_EVENTS = 500_000
# From top to bottom; others come below.
TRACKS = ("worker", "driver", "fetch", "put", "reading", "turns", "rounds", "queries")
_MAX_ROWS = 1000


class Trace:
    """Writes spans and counters as they end; safe from any thread. Times are `clock()`'s seconds, in the file
    microseconds since the trace began.

    Spans of a track that overlap in time are put on rows of their own (`queries`, `queries 2`, …), so that those of
    one row never do. After `max_events` nothing more is written, nor after the file could not be written: `problem`
    then says so, and what is traced goes on. Raises `InputError` where the file cannot be opened.
    """

    def __init__(
        self, path: Path, *, max_events: int = MAX_EVENTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            self._file = path.open("w", encoding="ascii", buffering=1)  # a line at a time: a crash loses none
        except OSError as error:
            raise InputError(f"--trace: {path} cannot be written: {error.strerror}") from error
        self.problem: str | None = None
        self._path = path
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._events_left = max_events
        self._comma = ""
        self._row_ends: dict[str, list[float]] = {track: [] for track in TRACKS}
        self._counts: dict[str, float] = {}
        with self._lock:
            self._guarded(lambda: self._file.write("[\n"))
            self._write({"ph": "M", "name": "process_name", "args": {"name": "antiphon"}})

    def span(self, track: str, name: str, started: float, **args: Any) -> None:
        """Something that began at `started` and ends now."""
        with self._lock:
            ended = self._clock()
            thread_id = self._take_row(track, started, ended)
            times = {"ts": self._microseconds(started), "dur": round((ended - started) * 1e6, 3)}
            self._write({"ph": "X", "tid": thread_id, "name": name, **times, "args": args})

    @contextmanager
    def spanning(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """A span around a block; also where the block fails."""
        started = self._clock()
        try:
            yield
        finally:
            self.span(track, name, started, **args)

    def counter(self, name: str, value: float) -> None:
        """A counter's value from now on; nothing is written where it is the last one."""
        with self._lock:
            if self._counts.get(name) != value:
                self._counts[name] = value
                times = {"ts": self._microseconds(self._clock())}
                self._write({"ph": "C", "tid": 0, "name": name, **times, "args": {"value": value}})

    def close(self) -> None:
        """Ends the file; what comes later is not written."""
        with self._lock:
            if not self._file.closed:
                self._guarded(lambda: self._file.write("]\n"))
                self._guarded(self._file.close)

    def _take_row(self, track: str, started: float, ended: float) -> int:
        """The track's first row whose last span had ended by then."""
        ends = self._row_ends.setdefault(track, [])
        row = next((row for row, end in enumerate(ends) if end <= started), len(ends))
        thread_id = 1 + list(self._row_ends).index(track) * _MAX_ROWS + row
        if row == len(ends):
            ends.append(ended)
            label = track if row == 0 else f"{track} {row + 1}"
            self._write({"ph": "M", "tid": thread_id, "name": "thread_name", "args": {"name": label}})
            self._write({"ph": "M", "tid": thread_id, "name": "thread_sort_index", "args": {"sort_index": thread_id}})
        ends[row] = ended
        return thread_id

    def _microseconds(self, seconds: float) -> float:
        return round((seconds - self._started) * 1e6, 3)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file.closed or self.problem is not None:
            return
        if self._events_left == 0:
            self.problem = f"the trace {self._path} is full: what came later is not in it"
            return
        self._events_left -= 1
        line = json.dumps({"pid": 1, **event})
        comma, self._comma = self._comma, ","
        self._guarded(lambda: self._file.write(f"{comma}{line}\n"))

    def _guarded(self, write: Callable[[], object]) -> None:
        """A full disk ends the trace, not what is traced."""
        try:
            write()
        except OSError as error:
            self.problem = self.problem or f"the trace {self._path} is incomplete: {error.strerror}"


def traced(trace: Trace | None, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
    """A span around a block, where there is a trace."""
    return nullcontext() if trace is None else trace.spanning(track, name, **args)


def trace_lane(trace: Trace, lane: Lane) -> None:
    """From now on every step of the lane is a span on its track, and every movement between its tiers one on theirs;
    its live rows and free pages are counters."""

    def stepped(phase: Phase, pieces: Sequence[Piece], started: float, num_live: int) -> None:
        num_tokens = sum(piece.num_computed for piece in pieces)
        trace.span(lane.name, phase.value, started, rows=len(pieces), tokens=num_tokens)
        trace.counter(f"{lane.name} live rows", num_live)
        trace.counter(f"{lane.name} free pages", lane.store.pool.num_free)

    def moved(kind: str, started: float, num_bytes: int) -> None:
        trace.span(kind, kind, started, bytes=num_bytes)

    lane.on_step = stepped
    lane.residency.on_move = moved


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, also of one that was cut anywhere."""
    events = []
    for line in path.read_text(encoding="ascii").splitlines()[1:]:
        try:
            events.append(json.loads(line.removeprefix(",")))
        except ValueError:
            break  # the closing bracket, or the process ended in the middle of this line
    return events
