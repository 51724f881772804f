"""The multi-hop QA data: questions, the pool of paragraphs, and documents of N paragraphs built from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.engine.errors import InputError
from antiphon.readers.extracted import normalise_text

_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Paragraph:
    """One pool row."""

    id: int
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """One question row. `gold` and `own` are pool ids; `own` holds the gold paragraphs and their own distractors."""

    id: str
    dataset: str
    type: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    own: tuple[int, ...]


@dataclass(frozen=True)
class QaDocument:
    """A built document. `spans` are character offsets (start, end) in `text`, one for each of `paragraph_ids`."""

    text: str
    paragraph_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    def span(self, paragraph_id: int) -> tuple[int, int]:
        """Where a paragraph stands in the text; raises `ValueError` where it is not part of the document."""
        return self.spans[self.paragraph_ids.index(paragraph_id)]


def load_questions(path: Path) -> list[Question]:
    """Read a `…_q128.jsonl`, in the file's order; raises `InputError` on a missing file or a damaged row."""
    return [
        Question(
            id=str(row["id"]),
            dataset=str(row["dataset"]),
            type=str(row["type"]),
            question=str(row["question"]),
            answers=tuple(row["answers"]),
            gold=tuple(row["gold"]),
            own=tuple(row["own"]),
        )
        for row in _rows(path, ("id", "dataset", "type", "question", "answers", "gold", "own"))
    ]


def load_pool(path: Path) -> dict[int, Paragraph]:
    """Read a `…_pool.jsonl` by pool id; raises `InputError` on a missing file or a damaged row."""
    return {
        row["id"]: Paragraph(id=row["id"], title=row["title"], text=row["text"])
        for row in _rows(path, ("id", "title", "text"))
    }


def build_document(
    question: Question, pool: Mapping[int, Paragraph], *, num_paragraphs: int, seed: int = 0
) -> QaDocument:
    """The question's own paragraphs and random fillers, shuffled: the same for the same seed and question, anywhere.

    Both the choice and the order sort by SHA-256 of (seed, question id, paragraph id), so they depend neither on a
    Python version's generator nor on the pool's order, and a longer document holds all paragraphs of a shorter one.
    Raises `InputError` where the pool cannot give exactly `num_paragraphs`.
    """
    missing = [paragraph_id for paragraph_id in (*question.own, *question.gold) if paragraph_id not in pool]
    if missing:
        raise InputError(
            f"question {question.id}: its paragraphs {missing} are not in the pool; load its own data set's pool"
        )
    own = list(dict.fromkeys((*question.own, *question.gold)))
    gold_titles = {pool[paragraph_id].title.casefold() for paragraph_id in question.gold}
    fillers = [p.id for p in pool.values() if p.id not in set(own) and p.title.casefold() not in gold_titles]
    if not len(own) <= num_paragraphs <= len(own) + len(fillers):
        raise InputError(
            f"question {question.id}: {num_paragraphs} paragraphs asked, but its own are {len(own)} and the pool has"
            f" {len(fillers)} fillers for it; ask between {len(own)} and {len(own) + len(fillers)}"
        )
    fillers.sort(key=lambda paragraph_id: _draw(seed, "filler", question.id, paragraph_id))
    chosen = own + fillers[: num_paragraphs - len(own)]
    chosen.sort(key=lambda paragraph_id: _draw(seed, "order", question.id, paragraph_id))
    return _write(tuple(pool[paragraph_id] for paragraph_id in chosen))


def _write(paragraphs: tuple[Paragraph, ...]) -> QaDocument:
    # In the form that `Document` keeps, so that the spans hold there too.
    pieces = [normalise_text(p.title, f"Document {i}:\n{p.title}\n{p.text}") for i, p in enumerate(paragraphs, start=1)]
    spans, start = [], 0
    for piece in pieces:
        spans.append((start, start + len(piece)))
        start += len(piece) + len(_SEPARATOR)
    return QaDocument(_SEPARATOR.join(pieces), tuple(p.id for p in paragraphs), tuple(spans))


def _draw(seed: int, purpose: str, question_id: str, paragraph_id: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{purpose}\0{question_id}\0{paragraph_id}".encode()).digest()


def _rows(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"evaluation data: no file {path}; give the folder that holds it with --data")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"evaluation data: {path}, line {number} is not JSON ({error})") from error
            if not isinstance(row, dict) or any(key not in row for key in keys):
                raise InputError(f"evaluation data: {path}, line {number} lacks one of {', '.join(keys)}")
            yield row
