"""`antiphon ask`: a question of a document, with a view of the work, then the answer, its evidence and its cost."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import typer

from antiphon.cli import ask_flags as flags
from antiphon.cli.answer_view import answer_json, print_answer
from antiphon.cli.ask_settings import AskSettings, ask_settings, flag_defaults
from antiphon.cli.console import stderr_console, stdout_console
from antiphon.cli.fetching import fetch_missing
from antiphon.cli.lazy_defaults import command_with_defaults
from antiphon.engine.errors import AntiphonError, InputError
from antiphon.results import Answer

if TYPE_CHECKING:
    from antiphon.saved_manifest import Manifest


def ask(
    arguments: flags.Arguments,
    worker: flags.Worker = None,
    driver: flags.Driver = None,
    worker_revision: flags.WorkerRevision = None,
    driver_revision: flags.DriverRevision = None,
    shard_tokens: flags.ShardTokens = None,
    shard_overlap: flags.ShardOverlap = None,
    encoding: flags.Encoding = None,
    method: flags.Method = None,
    rounds: flags.Rounds = None,
    max_new_tokens: flags.MaxNewTokens = None,
    temperature: flags.Temperature = None,
    seed: flags.Seed = None,
    gate: flags.Gate = None,
    readers: flags.Readers = None,
    second_reader: flags.SecondReader = None,
    query_first: flags.QueryFirst = None,
    reply_grammar: flags.ReplyGrammar = None,
    overlap: flags.Overlap = None,
    threads: flags.Threads = None,
    memory: flags.Memory = None,
    host_memory: flags.HostMemory = None,
    disk_memory: flags.DiskMemory = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    kv_cache_dtype: flags.KvCacheDtype = None,
    speculation: flags.Speculation = None,
    trace: flags.Trace = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Ask a QUESTION of the documents at PATH…, and show the answer with its evidence."""
    settings = ask_settings(arguments, encoding, locals())
    answer = run_ask(settings, quiet=quiet or json)
    if json:
        sys.stdout.write(answer_json(answer) + "\n")
    else:
        print_answer(stdout_console(), answer, quiet=quiet)
    if not answer.answer.strip():
        raise AntiphonError(f"no answer was found (stopped: {answer.stopped})")


def run_ask(settings: AskSettings, *, quiet: bool) -> Answer:
    """Show progress on standard error unless `quiet`, and return the answer."""
    # The engine and what stands on it take seconds to import, which no other command should pay for.
    from antiphon.api import ask_async
    from antiphon.assembly import EngineOptions
    from antiphon.cli.progress import show_progress
    from antiphon.document import Document
    from antiphon.methods.options import ParSerOptions
    from antiphon.saving import saved_corpus

    engine, options = EngineOptions(**settings.engine), ParSerOptions(**settings.parser)
    # Before any model is fetched or loaded: a document that cannot be read is told at once.
    saved = saved_corpus(settings.paths)
    if saved is None:
        document = Document.from_paths(settings.paths, encoding=settings.encoding or "utf-8")
    else:
        document = saved.document
        engine = EngineOptions(**{"worker": saved.worker, **settings.engine})
        _check_shards(saved, settings)
    console = stderr_console()
    fetch_missing((engine.worker, engine.driver), console, quiet=quiet)
    with show_progress(console, quiet=quiet) as sink:
        work = ask_async(saved or document, settings.question, engine=engine, options=options, on_event=sink)
        answer = asyncio.run(work)
    answer.notes.extend(f"skipped {skipped}" for skipped in document.skipped)
    return answer


def _check_shards(saved: Manifest, settings: AskSettings) -> None:
    """Raises `InputError` where other shards are asked for than were saved: they would all have to be read."""
    for name, own in (("shard_tokens", saved.shard_tokens), ("shard_overlap", saved.shard_overlap)):
        given = settings.parser.get(name, own)
        if given != own:
            raise InputError(
                f"corpus {saved.name!r} was saved with a {name.replace('_', ' ')} of {own}, {given} is asked: leave "
                "the flag away, or read the documents anew"
            )


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("ask", cls=command_with_defaults(flag_defaults, positionals="PATH… QUESTION"))(ask)
