"""Reading a document once for ever, and asking it again: from an engine to a saved corpus, and back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from antiphon.corpus import Corpus
from antiphon.document import Document
from antiphon.engine.cache_folder import corpora_folder
from antiphon.engine.errors import InputError
from antiphon.events import EventSink, ignore_event
from antiphon.methods.options import ParSerOptions
from antiphon.methods.prompts import ParSerPrompts
from antiphon.saved_corpora import SavedCorpora
from antiphon.saved_manifest import Manifest, SavedShard, check_corpus_name

if TYPE_CHECKING:
    from antiphon.api import Engine

# What stands before the name of a saved corpus where a path could stand.
MARK = "@"


async def read_and_save(
    document: Document,
    name: str,
    engine: Engine,
    options: ParSerOptions,
    on_event: EventSink = ignore_event,
) -> Corpus:
    """Has the worker read what is not saved yet, and saves the corpus under `name`, which another one may have had.

    States are written while others are read, so a reading that was cut goes on where it was. Raises `InputError` for a
    name that cannot be one, before anything is read; `TierError` where a state, `AntiphonError` where the manifest
    cannot be written. The caller releases the corpus.
    """
    check_corpus_name(name)
    corpora = SavedCorpora(corpora_folder())
    instructions = ParSerPrompts().worker_instructions
    corpus = await engine.register(
        document,
        shard_tokens=options.shard_tokens,
        shard_overlap=options.shard_overlap,
        worker_instructions=instructions,
        on_event=on_event,
        save=True,
    )
    store = engine.worker.client.lane.store
    manifest = Manifest(
        name=name,
        saved_at=datetime.now(UTC),
        worker=engine.worker.name,
        fingerprint=store.fingerprint,
        shard_tokens=options.shard_tokens,
        shard_overlap=options.shard_overlap,
        worker_instructions=instructions,
        document=document,
        shards=tuple(
            SavedShard(prefix.key, prefix.num_tokens, shard.source, shard.start, shard.end)
            for shard, prefix in zip(corpus.shards, corpus.prefixes, strict=True)
        ),
    )
    try:
        corpora.save(manifest)
    except BaseException:
        await corpus.release()
        raise
    return corpus


def saved_corpus(paths: Sequence[str]) -> Manifest | None:
    """The saved corpus that `@NAME` in place of paths stands for, if it does. Raises `InputError` where it stands
    beside other paths, or there is none of this name."""
    names = [path.removeprefix(MARK) for path in paths if path.startswith(MARK)]
    if not names:
        return None
    if len(paths) > 1:
        raise InputError(
            f"{MARK}{names[0]} is a saved corpus, and {len(paths) - 1} more paths are given: ask it alone (a file of "
            f"that name is ./{MARK}{names[0]})"
        )
    return SavedCorpora(corpora_folder()).load(names[0])


def reading_note(manifest: Manifest, fingerprint: str) -> str | None:
    """Why a saved corpus has to be read again by a worker whose states have this fingerprint, where it has."""
    if fingerprint == manifest.fingerprint:
        return None
    return (
        f"corpus {manifest.name!r} was read again: it was saved under another model, precision or instruction set "
        f"(…{manifest.fingerprint[64:]}, this is …{fingerprint[64:]})"
    )
