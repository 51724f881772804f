"""`antiphon bench round`: the round by itself, timed, beside the floor of its own work."""

from __future__ import annotations

import asyncio
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from antiphon.cli.console import stderr_console, stdout_console
from antiphon.cli.fetching import fetch_missing
from antiphon.cli.lazy_defaults import command_with_defaults
from antiphon.memory_size import format_memory_size

if TYPE_CHECKING:
    from antiphon.bench_round import BenchRoundResult
    from antiphon.kernels.timing import OperationTime

# Flag: the field of `BenchRoundOptions` that it sets.
_FIELDS = {
    "model": "model",
    "shards": "num_shards",
    "shard_tokens": "shard_tokens",
    "suffix_tokens": "suffix_tokens",
    "new_tokens": "new_tokens",
    "rounds": "num_rounds",
    "threads": "threads",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "text": "text",
    "profile": "profile",
}

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="An embedded name, a folder, a .gguf file or a hub repository."),
]
Shards = Annotated[int | None, typer.Option("--shards", metavar="N", help="Rows of a round.")]
ShardTokens = Annotated[
    int | None, typer.Option("--shard-tokens", metavar="N", help="Tokens of a prefix, instruction included.")
]
SuffixTokens = Annotated[int | None, typer.Option("--suffix-tokens", metavar="N", help="Tokens of a query.")]
NewTokens = Annotated[
    int | None, typer.Option("--new-tokens", metavar="N", help="Tokens decoded in each row; end tokens do not end it.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", help="Rounds, each with a new query.")]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="Of computation; physical cores if not given.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option("--dtype", metavar="DTYPE", help="Of weights and KV: auto, float32 or bfloat16."),
]
Quantization = Annotated[
    Literal["none", "int8"] | None, typer.Option("--quantization", metavar="KIND", help="Of the weights: none or int8.")
]
KvCacheDtype = Annotated[
    Literal["auto", "float32", "bf16", "int8"] | None,
    typer.Option(
        "--kv-cache-dtype", metavar="DTYPE", help="Of keys and values that are kept: auto, float32, bf16 or int8."
    ),
]
TextPath = Annotated[
    Path | None, typer.Option("--text", metavar="PATH", help="Text to read; Python's standard library if not given.")
]
Profile = Annotated[bool, typer.Option("--profile", help="Show the seconds of each operation.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def run_round(
    model: Model = None,
    shards: Shards = None,
    shard_tokens: ShardTokens = None,
    suffix_tokens: SuffixTokens = None,
    new_tokens: NewTokens = None,
    rounds: Rounds = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = None,
    text: TextPath = None,
    profile: Profile = False,
    json: Json = False,
) -> None:
    """Time a round: all shards are read in the first, and their prefixes are kept for the others. Greedy."""
    flags = locals()
    from antiphon.bench_round import BenchRoundOptions, bench_round

    given = {name: flags[flag] for flag, name in _FIELDS.items() if flags[flag] is not None}
    options = BenchRoundOptions(**given)
    fetch_missing((options.model,), stderr_console(), quiet=json)
    result = asyncio.run(bench_round(options))
    if json:
        sys.stdout.write(dumps(result.to_json(), allow_nan=False) + "\n")
    else:
        _print(result)


def add_to(app: typer.Typer) -> None:
    """Register the command in a group of its own, for the benchmarks to come."""
    group = typer.Typer(help="Benchmarks of the engine by itself.", no_args_is_help=True)
    group.callback()(_group)
    group.command("round", cls=command_with_defaults(_defaults))(run_round)
    app.add_typer(group, name="bench")


def _defaults() -> dict[str, Any]:
    from antiphon.bench_round import BenchRoundOptions

    options = BenchRoundOptions()
    return {flag: getattr(options, name) for flag, name in _FIELDS.items()}


def _group() -> None:
    """Benchmarks of the engine by itself."""


def _print(result: BenchRoundResult) -> None:
    console = stdout_console()
    console.print(f"{result.model}, {result.dtype}, {result.threads} threads")
    heads = ("seconds", "floor", "prefill", "tokens/s", "cached", "decode", "tokens/s")
    console.print(f"{'round':<7}" + "".join(f"{head:>10}" for head in heads))
    for index, (done, floor) in enumerate(zip(result.rounds, result.floor.rounds, strict=True), start=1):
        console.print(
            f"{index:<7}{done.seconds:>10.2f}{floor.seconds:>10.2f}{done.prefill_tokens:>10,}"
            f"{done.prefill_tokens_per_second:>10,.0f}{done.cached_tokens:>10,}{done.decode_tokens:>10,}"
            f"{done.decode_tokens_per_second:>10,.1f}"
        )
    console.print(f"peak memory {format_memory_size(result.peak_bytes)}")
    console.print(
        f"floor from {result.floor.matrix_flops_per_second / 1e9:,.0f} GFLOP/s and "
        f"{result.floor.bandwidth_bytes_per_second / 1e9:,.1f} GB/s, measured in this run"
    )
    if result.profile is not None:
        _print_operations(console, "reading the shards", result.profile.read, result.profile.read_seconds)
        _print_operations(console, "all rounds", result.profile.rounds, result.profile.rounds_seconds)


def _print_operations(console: Console, title: str, times: dict[str, OperationTime], seconds: float) -> None:
    console.print(f"{title}: {seconds:.2f} s, of which in operations")
    for operation, time in times.items():
        share = time.seconds / seconds if seconds > 0 else 0.0
        console.print(f"  {operation:<24}{time.seconds:>10.3f} s{share:>8.1%}{time.num_calls:>10,} calls")
