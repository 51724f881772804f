"""What all peers have in common: their flags, the token file, the turns they take, and the JSON that they print.

Imported by scripts that run in environments of their own, so by nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PeerRound:
    """One round's times and counts. Prefill lasts until the last row has its first new token; decoding is the rest, and
    `decode_tokens` are those that came in it."""

    seconds: float
    prefill_seconds: float
    prefill_tokens: int
    prefill_tokens_per_second: float
    decode_seconds: float
    decode_tokens: int
    decode_tokens_per_second: float


@dataclass(frozen=True)
class Work:
    """The token file: `prefixes` [shards][tokens], `suffixes` [rounds][tokens], and how many new tokens a row gets."""

    prefixes: list[list[int]]
    suffixes: list[list[int]]
    new_tokens: int

    @staticmethod
    def read(path: Path) -> Work:
        """From the JSON that round_peers.py writes."""
        return Work(**json.loads(path.read_text()))

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of all shards."""
        return sum(map(len, self.prefixes))

    @property
    def max_row_tokens(self) -> int:
        """The longest that a row gets."""
        return max(map(len, self.prefixes)) + max(map(len, self.suffixes)) + self.new_tokens

    def prompts(self, suffix: Sequence[int]) -> list[list[int]]:
        """One round's prompts, a row for each shard."""
        return [[*prefix, *suffix] for prefix in self.prefixes]


def peer_round(start: float, after_prefill: float, end: float, num_prefill: int, num_decode: int) -> PeerRound:
    """From clock readings in seconds and counts of tokens."""
    prefill_seconds, decode_seconds = after_prefill - start, end - after_prefill
    return PeerRound(
        seconds=end - start,
        prefill_seconds=prefill_seconds,
        prefill_tokens=num_prefill,
        prefill_tokens_per_second=num_prefill / prefill_seconds,
        decode_seconds=decode_seconds,
        decode_tokens=num_decode,
        decode_tokens_per_second=num_decode / decode_seconds if num_decode and decode_seconds > 0 else 0.0,
    )


def turns() -> Iterator[int]:
    """Says that the peer is loaded, then counts a turn for every line of stdin; ends with stdin.

    Between turns the peer waits in a read, so that it leaves the cores to whoever has its turn.
    """
    print(json.dumps({"loaded": True}), flush=True)
    for number, _ in enumerate(sys.stdin):
        yield number


def print_result(
    about: Mapping[str, Any], rounds: Sequence[PeerRound], replies: Sequence[Sequence[Sequence[int]]]
) -> None:
    """One JSON line: `about` (engine, dtype, threads, …), rounds, peak memory, `replies` [rounds][shards][tokens]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result = {**about, "rounds": [asdict(round_) for round_ in rounds], "peak_bytes": peak, "replies": replies}
    print(json.dumps(result), flush=True)


def peer_parser(description: str | None, dtypes: Sequence[str], model_help: str) -> argparse.ArgumentParser:
    """Flags that every peer takes; the first of `dtypes` is the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help=model_help)
    parser.add_argument("--tokens", type=Path, help="JSON: prefixes, suffixes, new_tokens")
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0])
    parser.add_argument("--threads", type=int, default=None)
    return parser
