"""`antiphon bench round` beside transformers: the same token ids, each in a process of its own, in turns.

    python benchmarks/round_peers.py --shards 16 --shard-tokens 1024 --repeats 3

transformers keeps one static batch's DynamicCache between rounds (peers/transformers_round.py). Medians over the
repeats; a ratio above 1 means that Antiphon is faster. bfloat16 is far slower than float32 in torch on a processor
without AMX or AVX-512 BF16: there float32 is the fair peer.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.bench_round import BenchRoundOptions, take_tokens
from antiphon.engine.errors import AntiphonError
from antiphon.engine.model_source import resolve_model
from antiphon.evaluation.summary import markdown_table
from antiphon.machine import detect_machine
from antiphon.precision import KV_CACHE_DTYPES, QUANTIZATIONS

_PEER = Path(__file__).parent / "peers" / "transformers_round.py"
_RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")


def main() -> int:
    """Run both in turns and print the table; 1 where either fails."""
    arguments = _arguments()
    try:
        results = _measure(_options(arguments), arguments)
    except (AntiphonError, subprocess.CalledProcessError) as error:
        print(f"round_peers: {error}", file=sys.stderr)
        return 1
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(report(results, shlex.join(["python", *sys.argv])))
    return 0


def report(results: Mapping[str, Sequence[Mapping[str, Any]]], command: str) -> str:
    """The machine, the command and a table of medians by round, from each engine's results of all repeats."""
    ours, peers = results["antiphon"], results["transformers"]
    machine = detect_machine()
    lines = []
    for index in range(len(ours[0]["rounds"])):
        seconds = [median(run["rounds"][index]["seconds"] for run in runs) for runs in (ours, peers)]
        rates = [median(run["rounds"][index][rate] for run in runs) for rate in _RATES for runs in (ours, peers)]
        ratio = f"{seconds[1] / seconds[0]:.2f}"
        lines.append([str(index + 1), *(f"{s:.2f}" for s in seconds), ratio, *(f"{rate:,.0f}" for rate in rates)])
    header = ["round", "Antiphon s", "transformers s", "times faster"]
    header += [f"{name} {what} tok/s" for what in ("prefill", "decode") for name in ("Antiphon", "transformers")]
    peaks = [median(run["peak_bytes"] for run in runs) / 2**30 for runs in (ours, peers)]
    return "\n".join(
        [
            f"{machine.cpu}, {machine.usable_cores} cores, {', '.join(machine.instruction_sets)};"
            f" {ours[0]['threads']} and {peers[0]['threads']} threads",
            f"Antiphon {ours[0]['dtype']}; {peers[0]['engine']}, {peers[0]['dtype']}, {peers[0]['attention']},"
            f" torch {peers[0]['torch']}; medians of {len(ours)} turns",
            f"peak memory {peaks[0]:.2f} GiB and {peaks[1]:.2f} GiB",
            f"`{command}`",
            "",
            markdown_table(header, lines),
        ]
    )


def _options(arguments: argparse.Namespace) -> BenchRoundOptions:
    return BenchRoundOptions(
        model=arguments.model,
        num_shards=arguments.shards,
        shard_tokens=arguments.shard_tokens,
        suffix_tokens=arguments.suffix_tokens,
        new_tokens=arguments.new_tokens,
        num_rounds=arguments.rounds,
        threads=arguments.threads,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )


def _measure(options: BenchRoundOptions, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    source = resolve_model(options.model)
    tokens = take_tokens(source.tokenizer(), options)
    results: dict[str, list[dict[str, Any]]] = {"antiphon": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.json"
        work = {"prefixes": tokens.prefixes, "suffixes": tokens.suffixes, "new_tokens": options.new_tokens}
        path.write_text(json.dumps(work))
        turns: dict[str, Callable[[], list[str]]] = {
            "antiphon": lambda: _antiphon_command(options),
            "transformers": lambda: _peer_command(source.path, path, options, arguments),
        }
        for turn in range(arguments.repeats):
            for name, command in turns.items():
                result = _run_json(command())
                result.pop("replies", None)
                results[name].append(result)
                seconds = ", ".join(f"{round_['seconds']:.2f}" for round_ in result["rounds"])
                print(f"[turn {turn + 1} of {arguments.repeats}] {name}: {seconds} s", file=sys.stderr)
    return results


def _antiphon_command(options: BenchRoundOptions) -> list[str]:
    flags = {
        "--model": options.model,
        "--shards": options.num_shards,
        "--shard-tokens": options.shard_tokens,
        "--suffix-tokens": options.suffix_tokens,
        "--new-tokens": options.new_tokens,
        "--rounds": options.num_rounds,
        "--threads": options.threads,
        "--quantization": options.quantization,
        "--kv-cache-dtype": options.kv_cache_dtype,
    }
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    return [sys.executable, "-m", "antiphon", "bench", "round", *given, "--json"]


def _peer_command(model: Path, tokens: Path, options: BenchRoundOptions, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, str(_PEER), "--model", str(model), "--tokens", str(tokens), "--dtype", arguments.dtype]
    command += ["--prefill-tokens", str(arguments.prefill_tokens)]
    return [*command, "--threads", str(options.threads)] if options.threads else command


def _run_json(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _arguments() -> argparse.Namespace:
    defaults = BenchRoundOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=defaults.model, help="an embedded name, a .gguf file or a folder")
    parser.add_argument("--shards", type=int, default=defaults.num_shards)
    parser.add_argument("--shard-tokens", type=int, default=defaults.shard_tokens, help="instruction included")
    parser.add_argument("--suffix-tokens", type=int, default=defaults.suffix_tokens)
    parser.add_argument("--new-tokens", type=int, default=defaults.new_tokens)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of transformers")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="of Antiphon's weights")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of Antiphon")
    parser.add_argument("--prefill-tokens", type=int, default=4096, help="of a sub-batch in transformers' reading")
    parser.add_argument("--out", type=Path, help="JSON file of every run's result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
