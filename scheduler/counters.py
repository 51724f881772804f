"""What was saved, and what went wrong, as numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """One lane's counters since the start. Only the core's thread writes them."""

    rows_gated: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    shards_evicted: int = 0
    shards_fetched: int = 0
    bytes_fetched: int = 0
    fetch_seconds: float = 0.0
    shards_read_again: int = 0
    tokens_read_again: int = 0
    shards_cheaper_to_read: int = 0
    tier_failures: int = 0
    tier_waits_seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """All counters by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}
