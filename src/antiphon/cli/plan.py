"""`antiphon plan`: what reading documents and asking them would take, before anything is allocated."""

from __future__ import annotations

import json as json_module
import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from antiphon.cli import ask_flags as flags
from antiphon.cli.ask_settings import flag_defaults, sort_flags
from antiphon.cli.console import stderr_console, stdout_console
from antiphon.cli.fetching import fetch_missing
from antiphon.cli.lazy_defaults import command_with_defaults
from antiphon.memory_size import format_memory_size

if TYPE_CHECKING:
    from antiphon.read_plan import ReadPlan


def plan(
    paths: flags.Paths,
    worker: flags.Worker = None,
    driver: flags.Driver = None,
    worker_revision: flags.WorkerRevision = None,
    driver_revision: flags.DriverRevision = None,
    shard_tokens: flags.ShardTokens = None,
    shard_overlap: flags.ShardOverlap = None,
    encoding: flags.Encoding = None,
    threads: flags.Threads = None,
    memory: flags.Memory = None,
    host_memory: flags.HostMemory = None,
    disk_memory: flags.DiskMemory = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    kv_cache_dtype: flags.KvCacheDtype = None,
    json: flags.Json = False,
) -> None:
    """Show what reading the documents at PATH… and asking them would take: nothing is read or allocated."""
    engine_fields, parser_fields = sort_flags(locals())
    from antiphon.assembly import EngineOptions
    from antiphon.document import Document
    from antiphon.methods.options import ParSerOptions
    from antiphon.read_plan import plan_read

    engine, parser = EngineOptions(**engine_fields), ParSerOptions(**parser_fields)
    document = Document.from_paths(paths, encoding=encoding or "utf-8")
    fetch_missing((engine.worker, engine.driver), stderr_console(), quiet=json)
    made = plan_read(document, engine, parser)
    if json:
        sys.stdout.write(json_module.dumps(made.to_json(), allow_nan=False) + "\n")
    else:
        print_plan(stdout_console(), made)


def print_plan(console: Console, made: ReadPlan) -> None:
    """The plan as a short table."""
    console.print(f"worker {made.worker}, driver {made.driver}, {made.precision}")
    console.print(
        f"document of {made.document_tokens:,} tokens in {made.shards:,} shards behind {made.instruction_tokens} "
        f"tokens of instructions: {format_memory_size(made.state_bytes)} of state"
    )
    console.print("\nmemory", style="bold")
    for holder, num_bytes in made.ledger.items():
        console.print(f"  {holder:<18}{format_memory_size(num_bytes):>12}")
    console.print("\nshards", style="bold")
    for place in made.places:
        used, limit = format_memory_size(place.num_bytes), format_memory_size(place.limit_bytes)
        console.print(f"  {place.place:<18}{place.shards:>12,}   {used} of {limit}")
    if made.read_again_shards:
        console.print(f"  {'read again':<18}{made.read_again_shards:>12,}   in every round: raise --disk-memory")
    console.print(f"\na round goes in {made.waves:,} {'wave' if made.waves == 1 else 'waves'}")
    rates = f"{made.matrix_flops_per_second / 1e9:,.0f} GFLOP/s, {made.bandwidth_bytes_per_second / 1e9:,.1f} GB/s"
    console.print(
        f"at least {made.least_read_seconds:,.1f} s to read, {made.least_round_seconds:,.1f} s a round before its "
        f"replies are written (measured: {rates})"
    )


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan", cls=command_with_defaults(flag_defaults, positionals="PATH…"))(plan)
