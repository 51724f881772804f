"""Which progress is shown: a live view on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

from antiphon.cli.console import supports_live
from antiphon.cli.live_state import LiveState
from antiphon.cli.live_view import render_live
from antiphon.cli.progress_lines import ProgressLines
from antiphon.events import Event, EventSink, ignore_event

_FRAMES_PER_SECOND = 5


@contextmanager
def show_progress(console: Console, *, quiet: bool) -> Iterator[EventSink]:
    """Yield the sink that shows what happens on `console`; the live view is gone again when the block ends."""
    if quiet:
        yield ignore_event
    elif supports_live(console):
        with _live_sink(console) as sink:
            yield sink
    else:
        yield ProgressLines(console)


@contextmanager
def _live_sink(console: Console) -> Iterator[EventSink]:
    state, lock = LiveState(), threading.Lock()

    # Events come from the engine's threads while rich draws from one of its own.
    def apply(event: Event) -> None:
        with lock:
            state.apply(event)

    def render() -> RenderableType:
        with lock:
            return render_live(state, state.clock(), console.width)

    # Standard output is for the result alone, so it is not captured.
    with Live(
        get_renderable=render,
        console=console,
        refresh_per_second=_FRAMES_PER_SECOND,
        transient=True,
        redirect_stdout=False,
    ):
        yield apply
