"""Draws a `LiveState`: shards, the round, who found what, the driver's turns. Made for 80 columns and 24 lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from antiphon.cli.answer_view import location
from antiphon.cli.console import clean, shorten, shorten_start
from antiphon.cli.driver_turn import describe_turn
from antiphon.cli.live_state import LiveState, RoundState, ShardState
from antiphon.events import DriverTurn, ReadProgress
from antiphon.results import Evidence

_LABEL_WIDTH = 9
_GRID_LINES = 4
_QUERIES, _FINDINGS, _TURNS = 3, 4, 2
_PRECEDENCE = tuple(ShardState)
_CELLS = {
    ShardState.WAITING: ("·", "bright_black"),
    ShardState.READ: ("▪", "blue"),
    ShardState.ASKED: ("▫", "yellow"),
    ShardState.ABSTAINED: ("-", "bright_black"),
    ShardState.FOUND: ("◆", "bold green"),
}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def render_live(state: LiveState, now: float, width: int) -> RenderableType:
    """What is going on, then a table of labels and what they are about; `now` is the state's clock at this moment.

    All of `state` is read before this returns, so a caller may hold a lock around it.
    """
    room = width - _LABEL_WIDTH - 1
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=_LABEL_WIDTH - 1, style="bold", no_wrap=True)
    table.add_column(width=room, no_wrap=True)
    if state.read is not None:
        table.add_row("Read", _read_line(state, state.read, room))
    if state.num_shards:
        states = [state.shard_state(shard) for shard in range(state.num_shards)]
        _add_rows(table, "Shards", [*shard_grid(states, room), shard_legend(states, room)])
    if state.round is not None:
        _add_rows(table, f"Round {state.round.number}", _round_lines(state.round, room))
    if state.findings:
        _add_rows(table, "Found", _finding_lines(state.findings, room))
    if state.turns:
        _add_rows(table, "Driver", [Text(shorten(turn_line(turn), room)) for turn in state.turns[-_TURNS:]])
    return Group(_header(state, now, width), table)


def _header(state: LiveState, now: float, width: int) -> Text:
    elapsed = max(0.0, now - state.started)
    spinner = _SPINNER[int(elapsed * 5) % len(_SPINNER)]
    clock = f"{int(elapsed) // 60}:{int(elapsed) % 60:02d}"
    header = Text.assemble((f"{spinner} ", "cyan"), (state.activity, "bold cyan"))
    models = "  ".join(f"{role} {clean(loaded.name)}" for role, loaded in sorted(state.models.items(), reverse=True))
    room = width - header.cell_len - len(clock) - 4
    if models and room > 8:
        header.append("  " + shorten(models, room), "bright_black")
    header.append(" " * max(1, width - header.cell_len - len(clock)) + clock, "bright_black")
    return header


def _read_line(state: LiveState, read: ReadProgress, room: int) -> RenderableType:
    counts = f"{read.shards_done:,}/{read.shards_total:,} shards · {read.tokens_done:,} tokens"
    if state.read_tokens_per_second:
        counts += f" · {state.read_tokens_per_second:,.0f}/s"
    line = Table.grid(padding=(0, 1, 0, 0))
    bar = ProgressBar(
        total=max(1, read.tokens_total),
        completed=read.tokens_done if read.tokens_total else 1,
        width=max(4, room - len(counts) - 1),
        complete_style="blue",
        finished_style="blue",
    )
    line.add_row(bar, Text(counts, no_wrap=True))
    return line


def shard_grid(states: Sequence[ShardState], width: int) -> list[Text]:
    """The grid's lines: one cell a shard, or as many shards a cell as four lines of `width` cells need."""
    per_cell = shards_per_cell(len(states), width)
    lines: list[Text] = []
    for start in range(0, len(states), per_cell):
        if not lines or lines[-1].cell_len >= width:
            lines.append(Text())
        shown = max(states[start : start + per_cell], key=_PRECEDENCE.index)
        lines[-1].append(*_CELLS[shown])
    return lines


def shards_per_cell(num_shards: int, width: int) -> int:
    """The fewest shards a cell with which the grid fits its four lines."""
    return max(1, -(-num_shards // (max(1, width) * _GRID_LINES)))


def shard_legend(states: Sequence[ShardState], width: int) -> Text:
    """How many shards are in each state, each with its cell's glyph."""
    counts = Counter(states)
    legend = Text()
    for kind in (ShardState.WAITING, ShardState.READ, ShardState.ASKED, ShardState.ABSTAINED, ShardState.FOUND):
        if counts[kind]:
            legend.append("  " if legend else "").append(*_CELLS[kind])
            legend.append(f" {counts[kind]:,} {kind.value}", "bright_black")
    per_cell = shards_per_cell(len(states), width)
    if per_cell > 1:
        legend.append(f"  ({per_cell} shards a cell)", "bright_black")
    legend.truncate(width, overflow="ellipsis")
    return legend


def turn_line(turn: DriverTurn) -> str:
    """One line about a driver's turn."""
    return f"turn {turn.turn}, {turn.seconds:.1f} s: {describe_turn(turn.text)}"


def _add_rows(table: Table, label: str, lines: list[Text]) -> None:
    for index, line in enumerate(lines):
        table.add_row(label if index == 0 else "", line)


def _round_lines(state: RoundState, room: int) -> list[Text]:
    lines = [Text(shorten(f"“{clean(query)}”", room), "italic") for query in state.queries[:_QUERIES]]
    if len(state.queries) > _QUERIES:
        lines.append(Text(f"and {len(state.queries) - _QUERIES} more queries", "bright_black"))
    if state.seconds is not None:
        counts = f"{state.findings:,} found · {state.abstentions:,} abstained · {state.seconds:.1f} s"
    else:
        counts = f"{state.num_rows_done:,} of {state.num_rows:,} rows have answered"
    return [*lines, Text(counts, "bright_black")]


def _finding_lines(findings: list[Evidence], room: int) -> list[Text]:
    lines = []
    for evidence in findings[-_FINDINGS:]:
        mark, style = ("✓ ", "green") if evidence.verified else ("? ", "yellow")
        place = shorten_start(location(evidence), room // 3)
        line = Text.assemble((mark, style), (place, "cyan"), "  ", clean(evidence.answer) or clean(evidence.quote))
        line.truncate(room, overflow="ellipsis")
        lines.append(line)
    if len(findings) > _FINDINGS:
        lines.append(Text(f"and {len(findings) - _FINDINGS} before", "bright_black"))
    return lines
