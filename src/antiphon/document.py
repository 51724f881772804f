"""Step 1 of the reading path: a document becomes sources, and the sources become shards."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from antiphon.engine.errors import InputError
from antiphon.readers.detect import extract
from antiphon.readers.extracted import normalise_text
from antiphon.readers.paths import FoundFile, Skip, find_files, load_bytes
from antiphon.readers.plain import check_encoding
from antiphon.sharding import OffsetTokenizer, Shard, check_shard_size, cut_text

MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Source:
    """The text of one file. All offsets in Antiphon are character offsets into this extracted text.

    The text is in NFC and its lines end with one newline each, so for a text file that was not, offsets (not lines)
    differ from the file's own. `name` is the path as given; `page_starts`, for a file with pages, are the offsets at
    which they begin.
    """

    name: str
    text: str
    page_starts: tuple[int, ...] | None = None

    @cached_property
    def line_starts(self) -> array[int]:
        """The offset at which each line begins, found when first asked for."""
        starts = array("q", [0])
        newline = self.text.find("\n")
        while newline >= 0:
            starts.append(newline + 1)
            newline = self.text.find("\n", newline + 1)
        return starts

    def locate(self, start: int) -> tuple[int | None, int | None]:
        """The (line, None), or for a file with pages (None, page), of a character; both count from 1.

        Raises InputError for an offset outside of the text.
        """
        if not 0 <= start <= len(self.text):
            raise InputError(f"{self.name}: there is no character {start}: the text has {len(self.text)}")
        if self.page_starts is not None:
            return None, bisect_right(self.page_starts, start)
        return bisect_right(self.line_starts, start), None


@dataclass(frozen=True)
class Document:
    """What is asked about: sources in order. `skipped` states what was left out, and why, one line each."""

    sources: tuple[Source, ...]
    skipped: tuple[str, ...] = ()

    @classmethod
    def from_paths(
        cls, paths: Sequence[str | Path], *, encoding: str = "utf-8", max_file_bytes: int = MAX_FILE_BYTES
    ) -> Document:
        """Reads files, folders (all files in them, sorted, but hidden ones), globs, and "-" for standard input.

        Text of any kind, HTML, PDF and Word (.docx) are read; text is UTF-8, or has a byte order mark, or is in
        `encoding`. Raises InputError where a path named directly is missing, empty, binary, damaged, encrypted, over
        `max_file_bytes` or in another encoding; such files in a folder or a glob are skipped, and listed in `skipped`.
        """
        check_encoding(encoding)
        sources: list[Source] = []
        skipped: list[str] = []
        for found in find_files(paths):
            if isinstance(found, Skip):
                skipped.append(found.text)
                continue
            try:
                source, notes = _read(found, encoding, max_file_bytes)
            except InputError as error:
                if found.named:
                    raise
                skipped.append(str(error))
            else:
                sources.append(source)
                skipped.extend(notes)
        if not sources:
            raise InputError(_nothing_read(paths, skipped))
        return cls(tuple(sources), tuple(skipped))

    @classmethod
    def from_text(cls, text: str, name: str = "text") -> Document:
        """A document of one source. An empty text is allowed, and has no shards.

        Raises InputError for what no text holds (NUL characters, lone surrogates).
        """
        return cls((Source(name, normalise_text(name, text)),))

    def sharded(self, tokenizer: OffsetTokenizer, shard_tokens: int, shard_overlap: int = 0) -> tuple[Shard, ...]:
        """Cuts every source into shards of at most `shard_tokens` tokens; a shard never crosses sources.

        `shard_overlap` tokens of a shard come again in the next one. How it cuts, and what it raises: `cut_text`.
        """
        check_shard_size(shard_tokens, shard_overlap)
        spans = (
            (number, source, start, end)
            for number, source in enumerate(self.sources)
            for start, end in cut_text(source.text, tokenizer, shard_tokens, shard_overlap)
        )
        return tuple(
            Shard(index, number, start, end, source.text[start:end])
            for index, (number, source, start, end) in enumerate(spans)
        )

    def locate(self, source_index: int, start: int) -> tuple[int | None, int | None]:
        """The line or the page of a character of a source, as `Source.locate` gives it."""
        return self.sources[source_index].locate(start)


def _read(found: FoundFile, encoding: str, max_file_bytes: int) -> tuple[Source, tuple[str, ...]]:
    # A file name need not be text; it must be printable in messages and JSON all the same.
    name = found.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    extracted = extract(name, load_bytes(found.path, max_file_bytes), encoding)
    return Source(name, extracted.text, extracted.page_starts), extracted.notes


def _nothing_read(paths: Sequence[str | Path], skipped: Sequence[str]) -> str:
    if not paths:
        return "no document was given: name a file, a folder, a glob, or - for standard input"
    reasons = "".join(f"\n  {reason}" for reason in skipped[:5])
    more = f"\n  and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    return f"nothing that can be read in {', '.join(map(str, paths))}; skipped: {reasons or 'nothing'}{more}"
