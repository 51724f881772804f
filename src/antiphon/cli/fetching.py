"""Fetching embedded models with a progress bar, on the main thread, so that Ctrl-C stops it at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from antiphon.cli.console import supports_live
from antiphon.memory_size import format_memory_size

Source = Literal["auto", "hub", "index"]


def fetch_missing(names: Iterable[str], console: Console, *, quiet: bool) -> None:
    """Fetch those of `names` that are embedded models and not yet in the cache; other names are left alone."""
    from antiphon.engine.embedded_models import EMBEDDED_MODELS
    from antiphon.engine.fetch import fetch_embedded, is_fetched

    for name in dict.fromkeys(names):
        if name in EMBEDDED_MODELS and not is_fetched(name):
            if quiet:
                fetch_embedded(name)
            else:
                fetch_with_progress(name, "auto", console)


def fetch_with_progress(name: str, source: Source, console: Console) -> str:
    """Fetch one embedded model and return its path; a bar on a terminal, a line at each tenth elsewhere."""
    from antiphon.engine.fetch import fetch_embedded

    if not supports_live(console):
        return str(fetch_embedded(name, source=source, progress=PrintedTenths(name, console)))
    columns = (TextColumn("{task.description}"), BarColumn(None), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        return str(
            fetch_embedded(
                name, source=source, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
        )


class PrintedTenths:
    """Progress where no bar can be drawn: a line at each tenth."""

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._console = console
        self._printed = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        tenth = 10 * done_bytes // max(1, total_bytes)
        if tenth > self._printed:
            self._printed = tenth
            done, total = format_memory_size(done_bytes), format_memory_size(total_bytes)
            self._console.print(f"{self._name}  {done} of {total}")
