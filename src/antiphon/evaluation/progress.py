"""A line per finished trial with the time that is left, for runs of hours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Counts trials of this run. The time left assumes that the rest take as long as those so far did on average."""

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._stream, self._clock = total, stream, clock
        self._done, self._start = 0, clock()

    def step(self, message: str) -> None:
        """One trial ended: write its message with the counts and times."""
        self._done += 1
        elapsed = self._clock() - self._start
        left = elapsed / self._done * (self._total - self._done)
        self._stream.write(f"[{self._done}/{self._total}, {_clock(elapsed)} gone, {_clock(left)} left] {message}\n")
        self._stream.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
