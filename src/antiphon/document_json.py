"""`Document` to JSON and back: all that it needs without the files that it came from."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from antiphon.document import Document, Source
from antiphon.engine.errors import InputError
from antiphon.readers.extracted import check_characters


def document_to_json(document: Document) -> dict[str, Any]:
    """Sources (name, text, where pages begin) and what was skipped, as plain JSON values."""
    return {"sources": [_to_json(source) for source in document.sources], "skipped": list(document.skipped)}


def document_from_json(value: Any) -> Document:
    """The reverse of `document_to_json`; raises ValueError where `value` is anything that it cannot have written."""
    sources, skipped = fields(value, sources=list, skipped=list)
    return Document(tuple(_source(source) for source in sources), tuple(items(skipped, str)))


def fields(value: Any, **kinds: type) -> list[Any]:
    """The values of a JSON object that has exactly these keys, each of its kind; else ValueError."""
    if type(value) is not dict or value.keys() != kinds.keys():
        raise ValueError(f"an object with {', '.join(kinds)} is expected, there is {value!r:.60}")
    for key, kind in kinds.items():
        if type(value[key]) is not kind:  # exactly: a bool is no int
            raise ValueError(f"{key} is {value[key]!r:.60}, which is no {kind.__name__}")
    return [value[key] for key in kinds]


def items(value: list[Any], kind: type) -> list[Any]:
    """The items of a JSON list, each of this kind; else ValueError."""
    for item in value:
        if type(item) is not kind:
            raise ValueError(f"{item!r:.60} stands in a list of {kind.__name__}")
    return value


def _to_json(source: Source) -> dict[str, Any]:
    pages = None if source.page_starts is None else list(source.page_starts)
    return {"name": source.name, "text": source.text, "page_starts": pages}


def _source(value: Any) -> Source:
    pages = value.get("page_starts") if isinstance(value, dict) else None
    name, text, _ = fields(value, name=str, text=str, page_starts=list if pages is not None else type(None))
    try:
        check_characters(name, text)
    except InputError as error:
        raise ValueError(str(error)) from error
    if pages is None:
        return Source(name, text)
    starts = items(pages, int)
    if starts[:1] != [0] or starts[-1] > len(text) or any(later < start for start, later in pairwise(starts)):
        raise ValueError(f"{name!r:.60}: its pages do not begin in order within its {len(text)} characters")
    return Source(name, text, tuple(starts))
