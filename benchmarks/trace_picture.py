"""Draws a trace file (`antiphon ask … --trace trace.json`) as a picture: tracks as lanes, colours by what was done.

python benchmarks/trace_picture.py trace.json out.png [--title TEXT]

Needs matplotlib (a requirement of development).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.scheduler.trace import read_trace

# In the order of the legend. Spans of the tracks above the lanes all have their track's colour.
COLOURS = {
    "read": "#4c78a8",
    "extend": "#f2a541",
    "decode": "#59a14f",
    "fetch": "#9c6bb0",
    "put": "#c9b1d6",
    "reading": "#a9c4de",
    "turns": "#b4d8ae",
    "rounds": "#e8e0d0",
    "queries": "#f9d9a8",
}
METHOD_TRACKS = ("reading", "turns", "rounds", "queries")
OTHER = "#bbbbbb"
_LANE_INCHES, _WIDTH_INCHES, _CHARS_PER_INCH, _DPI = 0.42, 11.0, 13, 130
_MIN_EDGED = 0.003  # of the picture's width: narrower spans would be all edge


@dataclass(frozen=True)
class Span:
    """One rectangle: seconds since the first span began, and how long it is."""

    name: str
    started: float
    seconds: float


def spans_by_lane(events: Iterable[dict[str, Any]]) -> dict[str, list[Span]]:
    """The lanes to draw, from top to bottom: the method's tracks, then the models', then the tiers'."""
    names: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    for event in events:
        if event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            spans.setdefault(event["tid"], []).append(Span(event["name"], event["ts"] / 1e6, event["dur"] / 1e6))
    started = min((span.started for lane in spans.values() for span in lane), default=0.0)
    order = sorted(spans, key=lambda tid: (track_of(names[tid]) not in METHOD_TRACKS, tid))
    return {names[tid]: [Span(s.name, s.started - started, s.seconds) for s in spans[tid]] for tid in order}


def track_of(lane: str) -> str:
    """A lane's track: `queries 2` is the second row of `queries`."""
    return lane.split(" ")[0]


def colour_key(lane: str, span: Span) -> str:
    """What a span's colour says: of steps the phase, of others their track."""
    track = track_of(lane)
    return span.name if track not in COLOURS else track


def draw(lanes: dict[str, list[Span]], path: Path, title: str) -> None:
    """Writes the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(_WIDTH_INCHES, 1.5 + _LANE_INCHES * len(lanes)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    used = set()
    end = max(span.started + span.seconds for spans in lanes.values() for span in spans)
    for place, (lane, spans) in enumerate(lanes.items()):
        keys = [colour_key(lane, span) for span in spans]
        used |= set(keys)
        colours = [COLOURS.get(key, OTHER) for key in keys]
        edges = ["white" if span.seconds > _MIN_EDGED * end else "none" for span in spans]
        bars = [(span.started, span.seconds) for span in spans]
        axes.broken_barh(bars, (place - 0.38, 0.76), facecolors=colours, edgecolors=edges, linewidth=0.4, aa=False)
        for span in spans if track_of(lane) in METHOD_TRACKS else ():
            _label(axes, span, place, end)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    # The method's spans are named where they stand; the legend is for the steps.
    shown = [name for name in COLOURS if name in used and name not in METHOD_TRACKS]
    patches = [Patch(color=COLOURS[name], label=name) for name in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path)


def _label(axes: Any, span: Span, place: int, end: float) -> None:
    """The span's name inside its rectangle, cut to its width; nothing where hardly a word fits."""
    from matplotlib.patches import Rectangle

    num_chars = int(span.seconds / end * _WIDTH_INCHES * _CHARS_PER_INCH)
    if num_chars >= 6:
        name = span.name if len(span.name) <= num_chars else span.name[: num_chars - 1] + "…"
        text = axes.text(span.started + 0.003 * end, place, name, va="center", fontsize=8, clip_on=True)
        text.set_clip_path(Rectangle((span.started, place - 0.5), span.seconds, 1, transform=axes.transData))


def main(arguments: Sequence[str]) -> int:
    """Reads a trace, draws it; 1 where there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    given = parser.parse_args(arguments)
    lanes = spans_by_lane(read_trace(given.trace))
    if not lanes:
        print(f"{given.trace} has no spans", file=sys.stderr)
        return 1
    draw(lanes, given.picture, given.title or given.trace.stem)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
