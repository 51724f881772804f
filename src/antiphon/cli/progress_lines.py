"""Progress as plain lines, for logs and pipes: one line for each thing that happened, none for what merely went on."""

from __future__ import annotations

from rich.console import Console

from antiphon.cli.answer_view import location
from antiphon.cli.console import clean, shorten
from antiphon.cli.live_state import LiveState
from antiphon.cli.live_view import turn_line
from antiphon.events import (
    DriverTurn,
    Event,
    FindingFound,
    ModelLoaded,
    ReadProgress,
    RoundFinished,
    RoundStarted,
)

_READ_STEPS = 10
_QUOTE_WIDTH, _TURN_WIDTH = 160, 160


class ProgressLines:
    """An event sink that prints lines to `console`; of the reading, a line at each tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = LiveState()
        self._read_step = -1

    def __call__(self, event: Event) -> None:
        """Take one event and print its line, if it has one."""
        self._state.apply(event)
        line = self._line(event)
        if line is not None:
            self._console.print(line, soft_wrap=True)

    def _line(self, event: Event) -> str | None:
        match event:
            case ModelLoaded():
                return f"{event.role} {clean(event.name)} loaded in {event.seconds:.1f} s"
            case ReadProgress():
                return self._read_line(event)
            case RoundStarted():
                queries = "; ".join(f"“{clean(query)}”" for query in event.queries)
                return f"round {event.round}: asking {event.shards:,} shards {queries}"
            case FindingFound():
                evidence = event.evidence
                mark = "verified" if evidence.verified else "unverified"
                text = shorten(f"{evidence.answer} “{evidence.quote}”", _QUOTE_WIDTH)
                return f"found at {location(evidence)} ({mark}): {text}"
            case RoundFinished():
                counts = f"{event.findings:,} found, {event.abstentions:,} abstained"
                return f"round {event.round}: {counts}, {event.seconds:.1f} s"
            case DriverTurn():
                return shorten(f"driver {turn_line(event)}", _TURN_WIDTH)
        return None

    def _read_line(self, event: ReadProgress) -> str | None:
        step = _READ_STEPS * event.shards_done // max(1, event.shards_total)
        if step == self._read_step:
            return None
        self._read_step = step
        speed = self._state.read_tokens_per_second
        rate = f", {speed:,.0f} tokens/s" if speed else ""
        shards = f"{event.shards_done:,}/{event.shards_total:,} shards"
        return f"read {shards}, {event.tokens_done:,}/{event.tokens_total:,} tokens{rate}"
