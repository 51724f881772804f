"""What it costs to put a prefix's state into a tier and to fetch it, and what bounds it.

    python benchmarks/tiers.py --folder /tmp/tiers --tokens 1024

The state is one shard's of the 0.5B (24 layers, 2 heads of keys and values, 64 numbers each, bfloat16). Every state is
compared bit for bit with what was put before anything is timed. The host tier without int8 copies nothing: no rate.
*cold*: the system was told to forget the file; on a virtual machine the host may still have it. The floors, from the
same run: the checksums alone, and reading the file into memory that is there already. Medians and ranges over all
states; one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import torch

from antiphon.engine.disk_tier import DiskTier
from antiphon.engine.host_tier import HostTier
from antiphon.engine.tiers import PrefixState, Tier
from antiphon.evaluation.summary import markdown_table

T = TypeVar("T")

_LAYERS, _KV_HEADS, _HEAD_DIM = 24, 2, 64
_LIMIT_BYTES = 1 << 40


def main() -> int:
    """Compare, time and print one table; 1 where a tier gives other bits."""
    arguments = _arguments()
    torch.set_num_threads(1)
    states = [_state(index, arguments.tokens) for index in range(arguments.states)]
    num_bytes = states[0].num_bytes
    lines: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        for name, temporary in (("disk, until the process ends", True), ("disk, saved", False)):
            with closing(DiskTier(Path(made) / name, _LIMIT_BYTES, temporary=temporary)) as tier:
                if not _gives_back(tier, states):
                    return 1
                lines += [(f"{name}: {what}", rate) for what, rate in _disk_rates(tier, Path(made), states)]
    if not _gives_back(HostTier(_LIMIT_BYTES), states):
        return 1
    host = HostTier(_LIMIT_BYTES, int8=True)
    lines.append(("host, int8: put", _rates(host.put, states, num_bytes)))
    lines.append(("host, int8: fetch", _rates(lambda state: host.fetch(state.key), states, num_bytes)))
    data = memoryview(bytearray(num_bytes))
    for algorithm in ("sha256", "blake2b"):
        rate = _rates(lambda _, algorithm=algorithm: hashlib.new(algorithm, data).digest(), states, num_bytes)
        lines.append((f"{algorithm} alone", rate))
    print(f"states of {arguments.tokens:,} tokens, {num_bytes / 1e6:.1f} MB, {len(states)} of them\n")
    print(markdown_table(("what", "GB/s (range)"), lines))
    return 0


def _disk_rates(tier: DiskTier, folder: Path, states: Sequence[PrefixState]) -> list[tuple[str, str]]:
    """Of a tier that holds the states in `folder`."""
    num_bytes = states[0].num_bytes

    def fetch(state: PrefixState) -> None:
        tier.fetch(state.key)

    put, warm = _rates(tier.put, states, num_bytes), _rates(fetch, states, num_bytes)
    files = sorted(folder.rglob("*.safetensors"))
    target = bytearray(files[0].stat().st_size)
    plain = _rates(lambda file: _read(file, target), files, num_bytes)
    _forget(files)
    cold = _rates(fetch, states, num_bytes)
    return [("put", put), ("plain read, warm", plain), ("fetch, warm", warm), ("fetch, cold", cold)]


def _state(index: int, num_tokens: int) -> PrefixState:
    shape = (_LAYERS, _KV_HEADS, num_tokens, _HEAD_DIM)
    k, v = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    return PrefixState(index.to_bytes(32, "big"), tuple(range(192 + num_tokens)), 192, k, v)


def _gives_back(tier: Tier, states: Sequence[PrefixState]) -> bool:
    for state in states:
        tier.put(state)
        found = tier.fetch(state.key)
        same = found.token_ids == state.token_ids and torch.equal(found.k.view(torch.int16), state.k.view(torch.int16))
        if not (same and torch.equal(found.v.view(torch.int16), state.v.view(torch.int16))):
            print(f"tiers: {tier.name} gives other bits than were put, not timed", file=sys.stderr)
            return False
    return True


def _rates(work: Callable[[T], object], items: Sequence[T], num_bytes: int) -> str:
    rates = []
    for item in items:
        started = time.perf_counter()
        work(item)
        rates.append(num_bytes / (time.perf_counter() - started) / 1e9)
    return f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"


def _read(file: Path, target: bytearray) -> None:
    with file.open("rb", buffering=0) as opened:
        opened.readinto(target)


def _forget(files: Sequence[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="where the files go; the system's folder for temporary files if not"
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--states", type=int, default=24)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
