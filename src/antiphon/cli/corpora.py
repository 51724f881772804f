"""`antiphon corpora`: corpora that were saved: list, show, remove, verify."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from antiphon.cli.console import clean, stdout_console
from antiphon.memory_size import format_memory_size

if TYPE_CHECKING:
    from antiphon.engine.disk_tier import DiskTier
    from antiphon.saved_corpora import SavedCorpora
    from antiphon.saved_manifest import Manifest

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name that the corpus was saved under.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on one line.")]


def list_corpora(as_json: Json = False) -> None:
    """List the saved corpora: size, shards, the worker's model, and when each was saved."""
    from antiphon.engine.errors import InputError

    corpora, rows = _corpora(), list[dict[str, Any]]()
    with closing(corpora.tier(0)) as tier:
        for name in corpora.names():
            try:
                rows.append(_summary(corpora.load(name), tier))
            except InputError as error:
                rows.append({"name": name, "error": str(error)})
    console = stdout_console()
    if as_json:
        console.print(json.dumps(rows), soft_wrap=True)
        return
    if not rows:
        console.print("no corpus is saved")
    width = max((len(clean(row["name"])) for row in rows), default=0)
    for row in rows:
        console.print(f"{clean(row['name']):<{width}}  {_line(row)}", soft_wrap=True)


def show_corpus(name: Name, as_json: Json = False) -> None:
    """Show what a saved corpus holds, and what it was read with."""
    corpora = _corpora()
    manifest = corpora.load(name)
    with closing(corpora.tier(0)) as tier:
        summary = _summary(manifest, tier)
    details = summary | {
        "fingerprint": manifest.fingerprint,
        "shard_tokens": manifest.shard_tokens,
        "shard_overlap": manifest.shard_overlap,
        "worker_instructions": manifest.worker_instructions,
        "sources": [{"name": source.name, "characters": len(source.text)} for source in manifest.document.sources],
        "skipped": list(manifest.document.skipped),
    }
    console = stdout_console()
    if as_json:
        console.print(json.dumps(details), soft_wrap=True)
        return
    console.print(f"{name}  {_line(details)}", soft_wrap=True)
    console.print(
        f"  {details['prefix_tokens']:,} tokens in prefixes, shards of at most {manifest.shard_tokens} tokens"
    )
    console.print(f"  fingerprint {clean(manifest.fingerprint)}", soft_wrap=True)
    for source in details["sources"]:
        console.print(f"  {clean(source['name'])}  {source['characters']:,} characters", soft_wrap=True)
    for skipped in manifest.document.skipped:
        console.print(f"  skipped {clean(skipped)}", soft_wrap=True)


def remove_corpus(name: Name) -> None:
    """Remove a saved corpus, and what it holds on disk; shards that another corpus uses stay."""
    _corpora().remove(name)
    stdout_console().print(f"{name}  removed")


def verify_corpus(name: Name) -> None:
    """Check every byte of a saved corpus. What is damaged is deleted, and read again when the corpus is next asked."""
    from antiphon.engine.errors import AntiphonError

    corpora = _corpora()
    with closing(corpora.tier(0)) as tier:
        found = corpora.verify(name, tier)
    console = stdout_console()
    for shard, what in found.damaged:
        console.print(f"shard {shard}  damaged: {clean(what)}", soft_wrap=True)
    for shard in found.missing:
        console.print(f"shard {shard}  missing")
    num_bad = len(found.damaged) + len(found.missing)
    num_shards = num_bad + len(found.good)
    if num_bad:
        raise AntiphonError(f"corpus {name!r}: {num_bad} of {num_shards} shards are read again when it is next asked")
    console.print(f"{name}  {num_shards} shards are good")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    group = typer.Typer(
        help="Saved corpora, read once for ever: list, show, remove, verify them.", no_args_is_help=True
    )
    group.command("list")(list_corpora)
    group.command("show")(show_corpus)
    group.command("remove")(remove_corpus)
    group.command("verify")(verify_corpus)
    app.add_typer(group, name="corpora")


def _corpora() -> SavedCorpora:
    from antiphon.engine.cache_folder import corpora_folder
    from antiphon.saved_corpora import SavedCorpora

    return SavedCorpora(corpora_folder())


def _summary(manifest: Manifest, tier: DiskTier) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "saved_at": manifest.saved_at.isoformat(timespec="seconds"),
        "worker": manifest.worker,
        "num_shards": len(manifest.shards),
        "prefix_tokens": manifest.prefix_tokens,
        "num_bytes": sum(tier.file_bytes(key) for key in manifest.keys),
    }


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return clean(row["error"])
    size = format_memory_size(row["num_bytes"])
    return f"{size:>9}  {row['num_shards']:>5} shards  {clean(row['worker'])}  {row['saved_at']}"
