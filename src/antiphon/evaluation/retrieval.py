"""Whether the right shards were looked at: gold paragraphs against the shards that a round ranked, read or found in."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def shards_of(span: tuple[int, int], shard_spans: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Indices of the shards that hold a part of `span`; all spans are character offsets (start, end) of one text."""
    start, end = span
    return frozenset(i for i, (first, last) in enumerate(shard_spans) if first < end and start < last)


def recall(gold_shards: Sequence[frozenset[int]], chosen: Collection[int]) -> float:
    """Share of gold paragraphs of which at least one shard was chosen; one cut in two counts with either half."""
    return sum(bool(shards.intersection(chosen)) for shards in gold_shards) / len(gold_shards) if gold_shards else 0.0


def most_relevant(relevances: Sequence[float | None], num_readers: int) -> tuple[int, ...]:
    """The `num_readers` shards of highest relevance, best first; ties by position, shards without a value never."""
    ranked = sorted((-value, i) for i, value in enumerate(relevances) if value is not None)
    return tuple(i for _, i in ranked[:num_readers])
