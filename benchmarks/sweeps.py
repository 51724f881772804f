"""Orders and eviction rules side by side, without a model: the shards read again by the engine's own policy classes.

    python benchmarks/sweeps.py --plot docs/images/sweeps.png

Each row is the mean over some seeds (when questions come, how long their drivers pause). `scan` visits from the first
shard to the last every time, `sweep` in alternating direction; the rule beside it says which shard leaves the pool. A
cell has the hit rate and the shards read again per round, of all rounds of all questions. Some 20 s on one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from antiphon.evaluation.summary import markdown_table
from antiphon.scheduler.simulation import Order, Rule, Workload, simulate

Policy = tuple[Order, Rule]
POLICIES: tuple[Policy, ...] = tuple((order, rule) for order in Order for rule in Rule)
TABLE_CAPACITIES = (10, 25, 50, 75, 90, 100)
PLOT_CAPACITIES = tuple(range(10, 101, 5))
ROUNDS = (2, 4, 8, 12)
QUESTIONS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Point:
    """Means over the seeds."""

    hit_rate: float
    read_again_per_round: float

    def __str__(self) -> str:
        return f"{100 * self.hit_rate:.0f} % · {self.read_again_per_round:.2f}"


def main() -> int:
    """Print the tables, and draw the picture where one is asked for."""
    arguments = _arguments()
    base = Workload(arguments.shards, arguments.rounds)
    panels = {title: _over_capacities(workload, arguments.seeds) for title, workload in _workloads(base).items()}
    print(f"`{shlex.join(['python', *sys.argv])}`")
    for title, points in panels.items():
        shown = {f"{capacity} %": points[capacity] for capacity in TABLE_CAPACITIES}
        print(f"\n{title}, {arguments.shards} shards, {arguments.rounds} rounds\n\n{_table('capacity', shown)}")
    corpora = replace(base, num_shards=arguments.shards // 4, num_questions=4, num_corpora=4)
    by_rounds = {str(num): _points(replace(corpora, num_rounds=num), 50, arguments.seeds) for num in ROUNDS}
    print(f"\n4 questions over 4 corpora, capacity 50 %\n\n{_table('rounds', by_rounds)}")
    for name, pause in (("at once", 0), ("with pauses", arguments.shards)):
        many = {
            str(num): _points(replace(base, num_questions=num, longest_pause=pause), 50, arguments.seeds)
            for num in QUESTIONS
        }
        print(
            f"\nQuestions {name}, one corpus, capacity 50 %, {arguments.rounds} rounds\n\n{_table('questions', many)}"
        )
    if arguments.plot:
        _plot(panels, arguments.plot)
    return 0


def _workloads(base: Workload) -> dict[str, Workload]:
    """What is drawn, by its title."""
    pause = base.num_shards
    return {
        "1 question": base,
        "32 questions": replace(base, num_questions=32),
        "32 questions, drivers that pause": replace(base, num_questions=32, longest_pause=pause),
        "32 questions over 4 corpora": replace(base, num_questions=32, num_corpora=4, num_shards=base.num_shards // 4),
    }


def _over_capacities(workload: Workload, num_seeds: int) -> dict[int, dict[Policy, Point]]:
    capacities = sorted({*TABLE_CAPACITIES, *PLOT_CAPACITIES})
    return {capacity: _points(workload, capacity, num_seeds) for capacity in capacities}


def _points(workload: Workload, percent: int, num_seeds: int) -> dict[Policy, Point]:
    """Every order and rule over a pool that holds `percent` of all shards."""
    capacity = max(1, len(workload.shards()) * percent // 100)
    # A single question leaves nothing to chance.
    seeds = range(1 if workload.num_questions == 1 else num_seeds)
    points = {}
    for order, rule in POLICIES:
        outcomes = [simulate(replace(workload, seed=seed), capacity, order, rule) for seed in seeds]
        points[order, rule] = Point(
            fmean(outcome.hit_rate for outcome in outcomes),
            fmean(outcome.read_again_per_round for outcome in outcomes),
        )
    return points


def _name(policy: Policy) -> str:
    return f"{policy[0].value}, {policy[1].value}"


def _table(first: str, rows: Mapping[str, Mapping[Policy, Point]]) -> str:
    return markdown_table(
        [first, *map(_name, POLICIES)],
        [[name, *(str(points[policy]) for policy in POLICIES)] for name, points in rows.items()],
    )


def _plot(panels: Mapping[str, Mapping[int, Mapping[Policy, Point]]], path: Path) -> None:
    """Hit rate over capacity, a panel for each workload and a line for each policy; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"sweeps: no plot {path}, matplotlib is not installed (pip install 'antiphon[benchmarks]')", file=sys.stderr
        )
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.4), layout="constrained")
    all_axes = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, (title, points) in zip(all_axes, panels.items(), strict=True):
        for policy, style in _styles().items():
            rates = [100 * points[capacity][policy].hit_rate for capacity in PLOT_CAPACITIES]
            axes.plot(PLOT_CAPACITIES, rates, label=_name(policy), **style)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("capacity of the pool, % of all shards", fontsize=10)
    figure.supylabel("visits that find their shard in the pool, %", fontsize=10)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


def _styles() -> dict[Policy, dict[str, Any]]:
    """How each line is drawn: Belady as a wide pale band, since others lie on it. Belady's on a scan is left to the
    table: it lies on that of the predicted next use."""
    return {
        (Order.SCAN, Rule.LRU): {"color": "#7f7f7f", "linestyle": "--", "zorder": 3},
        (Order.SWEEP, Rule.LRU): {"color": "#5b2a86", "linestyle": "--", "zorder": 4},
        (Order.SCAN, Rule.PREDICTED): {"color": "#e07b1a", "zorder": 2},
        (Order.SWEEP, Rule.PREDICTED): {"color": "#1769aa", "zorder": 2},
        (Order.SWEEP, Rule.BELADY): {"color": "#bcdcf0", "linewidth": 6, "zorder": 1},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=40, help="in all, over all corpora; at least 4")
    parser.add_argument("--rounds", type=int, default=6, help="of each question")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="PNG file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
