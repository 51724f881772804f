"""How much slower a round is beside one other busy process: the same round alone and beside a Python loop, in turns.

    python benchmarks/busy_neighbour.py --shards 8 --shard-tokens 512 --repeats 3

Two threads on two cores have three quarters of the cores' time beside such a neighbour, so a perfect split loses a
third; threads that wait for each other by spinning lose far more. Medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.evaluation.summary import markdown_table
from antiphon.machine import detect_machine

_NEIGHBOUR = "n = 0\nwhile True:\n    n += 1"


def main() -> int:
    """Measure and print the table; 1 where a round fails."""
    arguments = _arguments()
    results: dict[str, list[dict[str, Any]]] = {"alone": [], "beside": []}
    try:
        for turn in range(arguments.repeats):
            results["alone"].append(run_round(arguments))
            with busy_processes(arguments.neighbours):
                results["beside"].append(run_round(arguments))
            seconds = [results[name][-1]["rounds"][0]["seconds"] for name in results]
            print(f"[turn {turn + 1} of {arguments.repeats}] {seconds[0]:.2f} and {seconds[1]:.2f} s", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"busy_neighbour: {error}", file=sys.stderr)
        return 1
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(report(results, arguments))
    return 0


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """`count` processes, each of which keeps a core busy while the block runs."""
    neighbours = [subprocess.Popen([sys.executable, "-S", "-c", _NEIGHBOUR]) for _ in range(count)]
    try:
        yield
        ended = [neighbour for neighbour in neighbours if neighbour.poll() is not None]
        if ended:
            raise subprocess.CalledProcessError(ended[0].returncode, "a busy neighbour, which ended too early")
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def run_round(arguments: argparse.Namespace) -> dict[str, Any]:
    """`antiphon bench round`'s JSON."""
    command = [sys.executable, "-m", "antiphon", "bench", "round", "--json", "--model", arguments.model]
    for name in ("shards", "shard_tokens", "suffix_tokens", "new_tokens", "rounds", "threads"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run([*command, *shlex.split(arguments.flags)], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def report(results: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    """The machine, the command, and seconds by round and phase."""
    machine = detect_machine()
    lines = []
    for index in range(arguments.rounds):
        for key, what in (("seconds", "all"), ("prefill_seconds", "prefill"), ("decode_seconds", "decode")):
            alone, beside = (median(run["rounds"][index][key] for run in results[name]) for name in results)
            ratio = f"{beside / alone:.2f}" if alone > 0 else "–"
            lines.append([f"{index + 1}, {what}", f"{alone:.2f}", f"{beside:.2f}", ratio])
    threads = results["alone"][0]["threads"]
    return "\n".join(
        [
            f"{machine.cpu}, {machine.usable_cores} cores, {', '.join(machine.instruction_sets)}; {threads} threads,"
            f" {results['alone'][0]['dtype']}; {arguments.neighbours} busy process(es)",
            f"`{shlex.join(['python', *sys.argv])}`",
            "",
            markdown_table(("round", "alone s", "beside s", "times slower"), lines),
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shard-tokens", type=int, default=512)
    parser.add_argument("--suffix-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each")
    parser.add_argument("--neighbours", type=int, default=1, help="busy processes")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--flags", default="", help="more flags of `antiphon bench round`, as one string")
    parser.add_argument("--out", type=Path, help="JSON file of every run's result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
