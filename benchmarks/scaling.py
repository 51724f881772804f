"""What twice the shards cost: rounds of the same shard size over 16, 32, 64, … shards, each in a process of its own.

    python benchmarks/scaling.py --shards 256 --shard-tokens 4096 --out scaling.jsonl

Reading and a later round are told apart: a round's suffixes attend to whole shards, so both should double. "times
the half" is the time over that of half as many shards. Writes a plot where matplotlib is there (`--plot`). The
same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.engine.errors import AntiphonError
from antiphon.evaluation.progress import Progress
from antiphon.evaluation.summary import markdown_table
from antiphon.evaluation.trial_log import TrialLog
from antiphon.machine import detect_machine

_LOW, _HIGH = 1.8, 2.2
_FIELDS = ("shard_tokens", "suffix_tokens", "new_tokens", "model", "threads", "flags")


def main() -> int:
    """Measure what the log lacks, then print the table; 1 where a round fails, 130 on Ctrl-C."""
    arguments = _arguments()
    sizes = doublings(arguments.first, arguments.shards)
    try:
        log = TrialLog(arguments.out, {name: getattr(arguments, name) for name in _FIELDS})
        work = [
            (size, turn) for turn in range(arguments.repeats) for size in sizes if not log.has(str(size), str(turn))
        ]
        progress = Progress(len(work), sys.stderr)
        for size, turn in work:
            result = run_round(size, arguments)
            log.append({"configuration": str(size), "question_id": str(turn), **result})
            first, later = (round_["seconds"] for round_ in result["rounds"][:2])
            progress.step(f"{size} shards: first round {first:.1f} s, second {later:.1f} s")
    except (AntiphonError, subprocess.CalledProcessError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scaling: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    points = summarise(log.rows, sizes)
    print(report(points, arguments))
    if arguments.plot:
        plot(points, arguments.plot)
    return 0


def doublings(first: int, last: int) -> list[int]:
    """`first`, twice that, and so on up to `last`."""
    sizes = [first]
    while sizes[-1] * 2 <= last:
        sizes.append(sizes[-1] * 2)
    return sizes


def run_round(num_shards: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """`antiphon bench round`'s JSON: a first round, that reads, and a second."""
    command = [sys.executable, "-m", "antiphon", "bench", "round", "--json", "--rounds", "2"]
    command += ["--shards", str(num_shards), "--shard-tokens", str(arguments.shard_tokens)]
    command += ["--suffix-tokens", str(arguments.suffix_tokens), "--new-tokens", str(arguments.new_tokens)]
    command += ["--model", arguments.model, *shlex.split(arguments.flags)]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def summarise(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[dict[str, float]]:
    """For each number of shards the fastest of its turns: seconds of both rounds, peak memory, and ratios to the
    half."""
    points: list[dict[str, float]] = []
    for size in sizes:
        runs = [row for row in rows if row["configuration"] == str(size)]
        point = {f"round {index + 1}": min(run["rounds"][index]["seconds"] for run in runs) for index in range(2)}
        point |= {"shards": size, "peak_gib": max(run["peak_bytes"] for run in runs) / 2**30}
        if points:
            point |= {f"ratio {index}": point[f"round {index}"] / points[-1][f"round {index}"] for index in (1, 2)}
        points.append(point)
    return points


def report(points: Sequence[Mapping[str, float]], arguments: argparse.Namespace) -> str:
    """The machine, the command, the table, and whether all ratios lie in the band."""
    machine = detect_machine()
    header = ("shards", "tokens", "round 1 s", "times the half", "round 2 s", "times the half", "peak GiB")
    lines = []
    for point in points:
        cells = [f"{point['shards']:,.0f}", f"{point['shards'] * arguments.shard_tokens:,.0f}"]
        for index in (1, 2):
            ratio = point.get(f"ratio {index}")
            cells += [f"{point[f'round {index}']:.2f}", "–" if ratio is None else f"{ratio:.2f}"]
        lines.append([*cells, f"{point['peak_gib']:.2f}"])
    ratios = [value for point in points for name, value in point.items() if name.startswith("ratio")]
    inside = sum(_LOW <= ratio <= _HIGH for ratio in ratios)
    return "\n".join(
        [
            f"{machine.cpu}, {machine.usable_cores} cores, {', '.join(machine.instruction_sets)}; {arguments.model}",
            f"`{shlex.join(['python', *sys.argv])}`",
            "",
            markdown_table(header, lines),
            "",
            f"{inside} of {len(ratios)} ratios lie between {_LOW} and {_HIGH}; fastest of {arguments.repeats}",
        ]
    )


def plot(points: Sequence[Mapping[str, float]], path: Path) -> None:
    """Seconds over shards, both axes by powers of two, with the line of exact doubling; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"scaling: no plot {path}, matplotlib is not installed", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    shards = [point["shards"] for point in points]
    for name in ("round 1", "round 2"):
        seconds = [point[name] for point in points]
        axes.plot(shards, seconds, marker="o", label=name)
        axes.plot(shards, [seconds[0] * n / shards[0] for n in shards], color="grey", linestyle=":")
    axes.set(xlabel="shards", ylabel="seconds (dotted: twice the time for twice the shards)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.legend()
    figure.savefig(path, dpi=150)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=16, help="the fewest shards")
    parser.add_argument("--shards", type=int, default=256, help="the most")
    parser.add_argument("--shard-tokens", type=int, default=1024)
    parser.add_argument("--suffix-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1, help="turns of each; the fastest counts")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--flags", default="", help="more flags of `antiphon bench round`, as one string")
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, continued where it exists")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
