"""`Manifest`: all that is needed to ask a saved corpus again without the files that it was read from."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from antiphon.document import Document
from antiphon.document_json import document_from_json, document_to_json, fields
from antiphon.engine.errors import InputError
from antiphon.sharding import Shard

FORMAT = "antiphon-corpus"
VERSION = 1
_KEY_BYTES = 32
# No dot in front: such names are hidden, or lead out of the folder.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class SavedShard:
    """Characters `start` to `end` of source number `source`, and the prefix that has read them: its key, and its length
    in tokens, instructions included."""

    key: bytes
    num_tokens: int
    source: int
    start: int
    end: int


@dataclass(frozen=True)
class Manifest:
    """A saved corpus but for its states. `worker` is the model's name; `fingerprint` is all that determines a state's
    bits beside its tokens. Raises InputError for values that no corpus has."""

    name: str
    saved_at: datetime
    worker: str
    fingerprint: str
    shard_tokens: int
    shard_overlap: int
    worker_instructions: str
    document: Document
    shards: tuple[SavedShard, ...]

    def __post_init__(self) -> None:
        check_corpus_name(self.name)
        if self.saved_at.utcoffset() is None:
            raise InputError(f"corpus {self.name!r}: the time {self.saved_at} at which it was saved has no time zone")
        if not 0 <= self.shard_overlap < self.shard_tokens:
            raise InputError(
                f"corpus {self.name!r}: {self.shard_overlap} tokens of shards of {self.shard_tokens} cannot overlap"
            )
        for index, shard in enumerate(self.shards):
            sources = self.document.sources
            inside = 0 <= shard.source < len(sources) and (
                0 <= shard.start < shard.end <= len(sources[shard.source].text)
            )
            if not inside or shard.num_tokens < 1 or len(shard.key) != _KEY_BYTES:
                raise InputError(f"corpus {self.name!r}: shard {index} is none of its document: {shard}")

    @property
    def keys(self) -> frozenset[bytes]:
        """The keys of all states that it needs."""
        return frozenset(shard.key for shard in self.shards)

    @property
    def prefix_tokens(self) -> int:
        """What every round reuses: all shards' prefix lengths."""
        return sum(shard.num_tokens for shard in self.shards)

    def document_shards(self) -> tuple[Shard, ...]:
        """The shards as they were cut, with no tokenizer."""
        sources = self.document.sources
        return tuple(
            Shard(index, shard.source, shard.start, shard.end, sources[shard.source].text[shard.start : shard.end])
            for index, shard in enumerate(self.shards)
        )

    def to_bytes(self) -> bytes:
        """JSON in ASCII, written one way, with a SHA-256 of all but its envelope."""
        corpus = {
            "name": self.name,
            "saved_at": self.saved_at.astimezone(UTC).isoformat(),
            "worker": self.worker,
            "fingerprint": self.fingerprint,
            "shard_tokens": self.shard_tokens,
            "shard_overlap": self.shard_overlap,
            "worker_instructions": self.worker_instructions,
            "document": document_to_json(self.document),
            "shards": [
                [shard.key.hex(), shard.num_tokens, shard.source, shard.start, shard.end] for shard in self.shards
            ],
        }
        checksum = hashlib.sha256(_dumped(corpus)).hexdigest()
        return _dumped({"format": FORMAT, "version": VERSION, "sha256": checksum, "corpus": corpus})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The reverse of `to_bytes`; raises ValueError, with what is wrong, unless it gives exactly these bytes."""
        try:
            envelope = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError("it is no JSON, or a part of one") from error
        if not isinstance(envelope, dict) or envelope.get("format") != FORMAT:
            raise ValueError("it is another program's")
        if envelope.get("version") != VERSION:
            raise ValueError(f"it has format version {envelope.get('version')!r:.20}, this is version {VERSION}")
        try:
            manifest = _manifest(envelope.get("corpus"))
            written = manifest.to_bytes()
        except (InputError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if written != data:
            raise ValueError("its checksum is not that of its bytes")
        return manifest


def is_corpus_name(name: str) -> bool:
    """Whether `name` can be a corpus's, and so a file's."""
    return _NAME.fullmatch(name) is not None


def check_corpus_name(name: str) -> None:
    """Raises InputError unless `name` can be a corpus's."""
    if not is_corpus_name(name):
        raise InputError(
            f"corpus name {name!r:.80}: a name has 1 to 64 letters (a to z), digits and '-_.', a letter or digit first"
        )


def _manifest(corpus: Any) -> Manifest:
    name, saved_at, worker, fingerprint, tokens, overlap, instructions, document, shards = fields(
        corpus,
        name=str,
        saved_at=str,
        worker=str,
        fingerprint=str,
        shard_tokens=int,
        shard_overlap=int,
        worker_instructions=str,
        document=dict,
        shards=list,
    )
    return Manifest(
        name=name,
        saved_at=datetime.fromisoformat(saved_at),
        worker=worker,
        fingerprint=fingerprint,
        shard_tokens=tokens,
        shard_overlap=overlap,
        worker_instructions=instructions,
        document=document_from_json(document),
        shards=tuple(_shard(shard) for shard in shards),
    )


def _shard(value: Any) -> SavedShard:
    kinds = [str, int, int, int, int]
    if type(value) is not list or [type(item) for item in value] != kinds:
        raise ValueError(f"a shard is {value!r:.60}")
    key, num_tokens, source, start, end = value
    return SavedShard(bytes.fromhex(key), num_tokens, source, start, end)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
