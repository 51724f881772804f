"""The live view is a fold over events: what happened is what is drawn, in 80 columns and 24 lines."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from antiphon.cli.console import make_console
from antiphon.cli.driver_turn import describe_turn
from antiphon.cli.live_state import LiveState, ShardState
from antiphon.cli.live_view import render_live, shard_grid, shard_legend, shards_per_cell
from antiphon.cli.progress_lines import ProgressLines
from antiphon.events import (
    Answered,
    DriverTurn,
    Event,
    FindingFound,
    ModelLoaded,
    ReadProgress,
    RoundFinished,
    RoundStarted,
    RowFinished,
)
from antiphon.results import Answer, Evidence

_CALL = '<tool_call>\n{"name": "query_agents", "arguments": {"query": "Who kept the \\u001b[31mlight?"}}\n</tool_call>'


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def evidence(shard: int = 2, *, verified: bool = True, source: str = "velm.txt") -> Evidence:
    return Evidence(source, 4, 9, 17, None, "Ada Torvik kept the light.", "Ada Torvik", verified, 0.5, shard, "q", 1)


def events(num_shards: int = 5) -> Iterator[Event]:
    yield ModelLoaded("worker", "small", 1.0)
    yield ModelLoaded("driver", "large", 2.0)
    for done in range(num_shards + 1):
        yield ReadProgress(done, num_shards, done * 1000, num_shards * 1000)
    yield DriverTurn(1, _CALL, 3.0)
    yield RoundStarted(1, ("Who kept the light?", "When?"), num_shards)
    for shard in range(num_shards):
        for query in (0, 1):
            yield RowFinished(1, query, shard, abstained=(shard, query) != (2, 0))
    yield FindingFound(evidence())
    yield RoundFinished(1, 1, 2 * num_shards - 1, 4.5)
    yield DriverTurn(2, "<answer>Ada Torvik</answer>", 1.0)
    yield Answered(Answer("Ada Torvik", "parser"))


def folded(stop: type | None = None, num_shards: int = 5) -> LiveState:
    """The state after all events, or up to and with the first of a kind."""
    clock = Clock()
    state = LiveState(clock=clock)
    for event in events(num_shards):
        clock.seconds += 1
        state.apply(event)
        if stop is not None and isinstance(event, stop):
            break
    return state


def drawn(state: LiveState, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(render_live(state, state.clock(), width))
    return capture.get().rstrip("\n").split("\n")


def states(state: LiveState) -> list[ShardState]:
    return [state.shard_state(shard) for shard in range(state.num_shards)]


def test_a_shard_waits_then_is_read() -> None:
    state = LiveState(clock=Clock())
    state.apply(ReadProgress(2, 5, 2000, 5000))
    assert states(state) == [ShardState.READ] * 2 + [ShardState.WAITING] * 3
    assert not state.read_done
    state.apply(ReadProgress(5, 5, 5000, 5000))
    assert states(state) == [ShardState.READ] * 5
    assert state.read_done


def test_a_shard_is_asked_until_every_query_has_its_row() -> None:
    state = folded(RoundStarted)
    assert states(state) == [ShardState.ASKED] * 5
    state.apply(RowFinished(1, 0, 3, abstained=True))
    assert state.shard_state(3) is ShardState.ASKED
    state.apply(RowFinished(1, 1, 3, abstained=True))
    assert state.shard_state(3) is ShardState.ABSTAINED


def test_a_find_shows_at_once_and_stays() -> None:
    state = folded(RoundStarted)
    state.apply(RowFinished(1, 1, 3, abstained=False))
    assert state.shard_state(3) is ShardState.FOUND
    state.apply(RowFinished(1, 1, 3, abstained=True))
    state.apply(RowFinished(1, 0, 3, abstained=True))
    assert state.shard_state(3) is ShardState.FOUND


def test_a_new_round_asks_every_shard_again() -> None:
    state = folded(RoundFinished)
    assert states(state)[2] is ShardState.FOUND
    state.apply(RoundStarted(2, ("Where?",), 5))
    assert states(state) == [ShardState.ASKED] * 5


def test_a_row_of_an_earlier_round_does_not_touch_the_newest() -> None:
    state = folded(RoundFinished)
    state.apply(RoundStarted(2, ("Where?",), 5))
    state.apply(RowFinished(1, 0, 0, abstained=False))
    assert state.shard_state(0) is ShardState.ASKED


def test_a_query_scattered_while_shards_are_read_leaves_unread_shards_waiting() -> None:
    state = LiveState(clock=Clock())
    state.apply(ReadProgress(2, 4, 2000, 4000))
    state.apply(RoundStarted(1, ("Who?",), 4))
    assert states(state) == [ShardState.ASKED, ShardState.ASKED, ShardState.WAITING, ShardState.WAITING]


def test_a_round_over_a_corpus_registered_before_shows_its_shards() -> None:
    state = LiveState(clock=Clock())
    state.apply(RoundStarted(1, ("Who?",), 3))
    assert states(state) == [ShardState.ASKED] * 3


def test_reading_speed_is_tokens_over_the_seconds_since_reading_began() -> None:
    clock = Clock()
    state = LiveState(clock=clock)
    clock.seconds += 50
    state.apply(ReadProgress(0, 4, 0, 4000))
    assert state.read_tokens_per_second == 0
    clock.seconds += 2
    state.apply(ReadProgress(2, 4, 2000, 4000))
    clock.seconds += 60
    assert state.read_tokens_per_second == 1000


@pytest.mark.parametrize(
    ("stop", "activity"),
    [
        (ModelLoaded, "loading models"),
        (ReadProgress, "reading"),
        (DriverTurn, "driver is thinking"),
        (RoundStarted, "asking, round 1"),
        (RoundFinished, "driver is thinking"),
        (Answered, "answered"),
    ],
)
def test_the_view_says_what_is_going_on(stop: type, activity: str) -> None:
    state = folded(stop)
    assert state.activity == activity
    assert activity in drawn(state)[0]


def test_everything_that_happened_is_drawn() -> None:
    text = "\n".join(drawn(folded(RoundFinished)))
    for piece in (
        "worker small",
        "driver large",
        "5/5 shards · 5,000 tokens · 1,000/s",
        "- 4 abstained",
        "◆ 1 found",
        "Round 1",
        "“Who kept the light?”",
        "1 found · 9 abstained · 4.5 s",
        "✓ velm.txt:17  Ada Torvik",
        "turn 1, 3.0 s: asks “Who kept the [31mlight?”",
    ):
        assert piece in text, piece


def test_the_cells_of_a_small_document_are_its_shards() -> None:
    [line] = shard_grid(states(folded(RoundFinished)), 70)
    assert line.plain == "--◆--"


@pytest.mark.parametrize("num_shards", [1, 69, 70, 71, 280, 281, 6400])
def test_any_number_of_shards_fits_four_lines_and_none_is_lost(num_shards: int) -> None:
    shards = [ShardState.ABSTAINED] * num_shards
    shards[-1] = ShardState.FOUND
    lines = shard_grid(shards, 70)
    assert len(lines) <= 4
    assert max(line.cell_len for line in lines) <= 70
    assert lines[-1].plain.endswith("◆")
    per_cell = shards_per_cell(num_shards, 70)
    assert sum(line.cell_len for line in lines) == -(-num_shards // per_cell)
    assert (f"({per_cell} shards a cell)" in shard_legend(shards, 70).plain) == (per_cell > 1)


@pytest.mark.parametrize("num_shards", [1, 5, 6400])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_view_fits_the_terminal(num_shards: int, width: int) -> None:
    state = folded(RoundStarted, num_shards)
    state.rounds[-1].queries = tuple("a very long query that goes on and on " * 9 for _ in range(16))
    for index in range(30):
        state.apply(
            FindingFound(evidence(index, source="some/very/long/path/" * 9 + "文書.txt", verified=index % 2 == 0))
        )
        state.apply(DriverTurn(index, "thinking " * 200, 1.0))
    lines = drawn(state, width)
    assert len(lines) <= 23
    assert max(map(len, lines)) <= width


def test_nothing_in_a_document_or_a_reply_reaches_the_terminal_as_a_command() -> None:
    state = folded(RoundStarted)
    hostile = "\x1b]0;title\x07\x1b[2J\u202e[bold]x[/bold]\n\r"
    state.apply(FindingFound(Evidence(hostile, 0, 1, 3, None, hostile, hostile, True, None, 0, hostile, 1)))
    state.apply(DriverTurn(2, hostile, 1.0))
    state.apply(RoundStarted(2, (hostile,), 5))
    text = "\n".join(drawn(state))
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(text)
    assert "[bold]x[/bold]" in text


def test_a_turn_is_described_without_the_syntax_of_its_calls() -> None:
    assert describe_turn(_CALL.replace("\\u001b[31m", "")) == "asks “Who kept the light?”"
    assert describe_turn("<answer>Ada\nTorvik</answer>") == "answers “Ada Torvik”"
    assert describe_turn("hm, \n well") == "hm, well"
    assert describe_turn("") == "wrote nothing"


def test_plain_lines_tell_the_same_without_control_codes() -> None:
    stream = io.StringIO()
    lines = ProgressLines(make_console(stream))
    for event in events(num_shards=100):
        lines(event)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.count("read ") == 11, "one line at each tenth of the reading, and one at its start"
    for piece in (
        "worker small loaded in 1.0 s",
        "read 100/100 shards, 100,000/100,000 tokens",
        "round 1: asking 100 shards “Who kept the light?”; “When?”",
        "found at velm.txt:17 (verified): Ada Torvik “Ada Torvik kept the light.”",
        "round 1: 1 found, 199 abstained, 4.5 s",
        "driver turn 2, 1.0 s: answers “Ada Torvik”",
    ):
        assert piece in text, piece
