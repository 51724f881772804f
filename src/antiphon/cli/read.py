"""`antiphon read`: documents are read once and saved, to be asked as `@NAME` any time later."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from antiphon.cli import ask_flags as flags
from antiphon.cli.ask_settings import flag_defaults, sort_flags
from antiphon.cli.console import stderr_console, stdout_console
from antiphon.cli.fetching import fetch_missing
from antiphon.cli.lazy_defaults import command_with_defaults

Save = Annotated[str, typer.Option("--save", metavar="NAME", help="Under which name; asked later as @NAME.")]


def read(
    paths: flags.Paths,
    save: Save,
    worker: flags.Worker = None,
    worker_revision: flags.WorkerRevision = None,
    shard_tokens: flags.ShardTokens = None,
    shard_overlap: flags.ShardOverlap = None,
    encoding: flags.Encoding = None,
    threads: flags.Threads = None,
    memory: flags.Memory = None,
    disk_memory: flags.DiskMemory = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    kv_cache_dtype: flags.KvCacheDtype = None,
    quiet: flags.Quiet = False,
) -> None:
    """Read the documents at PATH… and save what the worker computed. What is saved already is not read again."""
    engine_fields, parser_fields = sort_flags(locals())
    from antiphon.api import Engine
    from antiphon.assembly import EngineOptions
    from antiphon.cli.progress import show_progress
    from antiphon.document import Document
    from antiphon.methods.options import ParSerOptions
    from antiphon.saved_manifest import check_corpus_name
    from antiphon.saving import read_and_save

    options, parser = EngineOptions(**engine_fields), ParSerOptions(**parser_fields)
    check_corpus_name(save)
    document = Document.from_paths(paths, encoding=encoding or "utf-8")
    console = stderr_console()
    fetch_missing((options.worker,), console, quiet=quiet)

    async def run() -> str:
        with show_progress(console, quiet=quiet) as sink:
            async with Engine(options, sink, worker_only=True) as engine:
                started = time.perf_counter()
                corpus = await read_and_save(document, save, engine, parser, sink)
                seconds = time.perf_counter() - started
                await corpus.release()
        return (
            f"{save}  {len(corpus.shards):,} shards, {corpus.document_tokens:,} tokens, {corpus.prefill_tokens:,} read "
            f"in {seconds:.1f} s"
        )

    line = asyncio.run(run())
    output = stdout_console()
    output.print(line)
    if not quiet:
        output.print(f'ask it with: antiphon ask @{save} "…"')
        for skipped in document.skipped:
            output.print(f"skipped {skipped}", soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("read", cls=command_with_defaults(flag_defaults, positionals="PATH…"))(read)
