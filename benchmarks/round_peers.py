"""`antiphon bench round` beside other engines: the same token ids, each in a process of its own, in turns.

    python benchmarks/round_peers.py --engines antiphon,antiphon:int8,vllm,vllm:w8a8,openvino --repeats 5

peers/engines.py says which engines there are, with their dtypes; vLLM and OpenVINO run in environments of their own
(`benchmarks/peers/setup.sh NAME`). Weights are converted before the first turn. Each is loaded once, so memory must
hold all together, and sleeps while another has its turn; nothing that a turn read is kept for the next. Medians over
the turns; a ratio above 1 means that the first engine named is faster. On a processor without AMX or AVX-512 BF16,
bfloat16 is far slower than float32 in torch, and so in transformers and vLLM: there float32 is the fair peer. vLLM's
wheel has kernels for AVX2.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.bench_round import BenchRoundOptions, take_tokens
from antiphon.engine.errors import AntiphonError
from antiphon.engine.model_source import resolve_model
from antiphon.evaluation.summary import markdown_table
from antiphon.machine import detect_machine

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from engines import Engine

Results = Mapping[str, Sequence[Mapping[str, Any]]]


def main() -> int:
    """Run all in turns and print the tables; 1 where one fails."""
    arguments = _arguments()
    try:
        engines = [Engine.parse(name) for name in arguments.engines.split(",")]
        results = _measure(engines, _options(arguments), arguments)
    except (AntiphonError, subprocess.CalledProcessError) as error:
        print(f"round_peers: {error}", file=sys.stderr)
        return 1
    print(report(results, shlex.join(["python", *sys.argv])))
    return 0


def report(results: Results, command: str) -> str:
    """The machine, the command, the engines, and a table of medians from each engine's results of all turns."""
    machine = detect_machine()
    base, *_ = results
    lines = []
    for name, runs in results.items():
        for index in range(len(runs[0]["rounds"])):
            seconds = _medians(runs, index, "seconds")
            ratio = seconds / _medians(results[base], index, "seconds")
            rates = [_medians(runs, index, f"{what}_tokens_per_second") for what in ("prefill", "decode")]
            spread = [run["rounds"][index]["seconds"] for run in runs]
            cells = [f"{seconds:.2f}", f"{min(spread):.2f} to {max(spread):.2f}", f"{ratio:.2f}"]
            lines.append([name, str(index + 1), *cells, *(f"{rate:,.0f}" for rate in rates)])
    header = ["engine", "round", "s", "from, to", f"{base} times faster", "prefill tok/s", "decode tok/s"]
    about = [
        [name, _version(runs[0]), runs[0]["dtype"], str(runs[0]["threads"]), f"{_peak_gib(runs):.2f}"]
        for name, runs in results.items()
    ]
    return "\n".join(
        [
            f"{machine.cpu}, {machine.usable_cores} cores, {', '.join(machine.instruction_sets)};"
            f" medians of {len(results[base])} turns",
            f"`{command}`",
            "",
            markdown_table(["engine", "version", "dtype", "threads", "peak GiB"], about),
            "",
            markdown_table(header, lines),
        ]
    )


def _medians(runs: Sequence[Mapping[str, Any]], index: int, key: str) -> float:
    return float(median(run["rounds"][index][key] for run in runs))


def _peak_gib(runs: Sequence[Mapping[str, Any]]) -> float:
    return float(median(run["peak_bytes"] for run in runs)) / 2**30


def _version(run: Mapping[str, Any]) -> str:
    return f"{run['engine']}, torch {run['torch']}, {run['attention']}" if "engine" in run else "this checkout"


def _options(arguments: argparse.Namespace) -> BenchRoundOptions:
    return BenchRoundOptions(
        model=arguments.model,
        num_shards=arguments.shards,
        shard_tokens=arguments.shard_tokens,
        suffix_tokens=arguments.suffix_tokens,
        new_tokens=arguments.new_tokens,
        num_rounds=arguments.rounds,
        threads=arguments.threads,
    )


def _measure(
    engines: Sequence[Engine], options: BenchRoundOptions, arguments: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    source = resolve_model(options.model)
    tokens = take_tokens(source.tokenizer(), options)
    models = {engine.name: engine.prepare(source) for engine in engines}
    results: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "tokens.json"
        work = {"prefixes": tokens.prefixes, "suffixes": tokens.suffixes, "new_tokens": options.new_tokens}
        path.write_text(json.dumps(work))
        peers = []
        for engine in engines:  # one after the other: loading takes the peak of memory
            peer = engine.start(models[engine.name], path, options.threads, arguments.prefill_tokens)
            peers.append(stack.enter_context(peer))
            print(f"{engine.name} is loaded", file=sys.stderr)
        for turn in range(arguments.repeats):
            for peer in peers:
                result = peer.turn()
                result.pop("replies", None)
                results[peer.name].append(result)
                seconds = ", ".join(f"{round_['seconds']:.2f}" for round_ in result["rounds"])
                print(f"[turn {turn + 1} of {arguments.repeats}] {peer.name}: {seconds} s", file=sys.stderr)
                if arguments.out:  # after each: turns take minutes, and a stopped run should leave what it has
                    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def _arguments() -> argparse.Namespace:
    defaults = BenchRoundOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="antiphon,transformers", help="comma list; ratios are to the first")
    parser.add_argument("--model", default=defaults.model, help="an embedded name, a .gguf file or a folder")
    parser.add_argument("--shards", type=int, default=defaults.num_shards)
    parser.add_argument("--shard-tokens", type=int, default=defaults.shard_tokens, help="instruction included")
    parser.add_argument("--suffix-tokens", type=int, default=defaults.suffix_tokens)
    parser.add_argument("--new-tokens", type=int, default=defaults.new_tokens)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--prefill-tokens", type=int, default=4096, help="most tokens that a peer computes at once")
    parser.add_argument("--out", type=Path, help="JSON file of every run's result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
