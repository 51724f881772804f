"""Rounds over more shards than the worker's pool holds, in the real engine: what is read again or fetched, and when.

    python benchmarks/sweep_rounds.py --shards 64 --shard-tokens 1024 --capacity 0.5 --rounds 4 --out F

Each configuration reads the same text on an engine of its own: all fits; least recently used on a scan (`lru`); sweeps
(`sweep`); sweeps with the disk below the pool (`disk`), or host memory as int8 (`host`, not exact). The replies and
relevances of every round are compared to those of the first configuration, to the bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.bench_round import sample_document
from antiphon.corpus import Corpus
from antiphon.engine.model_source import resolve_model
from antiphon.engine.pages import KVCache, num_pages_for
from antiphon.engine.sampling_params import SamplingParams
from antiphon.evaluation.summary import markdown_table
from antiphon.memory_plan import new_ledger, plan_memory
from antiphon.methods.backend import ScatterOptions
from antiphon.methods.prompts import ParSerPrompts
from antiphon.precision import QUANTIZATIONS

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "all fits": {"disk_memory_bytes": 0},
    "lru": {"eviction": "lru", "disk_memory_bytes": 0},
    "sweep": {"disk_memory_bytes": 0},
    "disk": {},
    "host": {"disk_memory_bytes": 0, "host_memory_bytes": 4 << 30},
}
QUERIES = (
    "Which exception is raised for a bad argument?",
    "Who wrote this module?",
    "Which default timeout is used?",
    "Which environment variable is read?",
)
_COUNTED = ("shards_read_again", "shards_fetched", "tier_waits_seconds")


def main() -> int:
    """Run every configuration asked for and print one line for each round."""
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    expected: list[Any] = []
    for name in arguments.configurations.split(","):
        found, measured = asyncio.run(_run(arguments, name))
        expected = expected or found
        for index, row in enumerate(measured):
            row["equal"] = found[index] == expected[index]
            print(json.dumps(row), file=sys.stderr, flush=True)
        rows += measured
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """One line a configuration and round."""
    header = ("configuration", "round", "shards read again", "shards fetched", "waits s", "round s", "same bits")
    lines = [
        [
            row["configuration"],
            str(row["round"]),
            *(f"{row[name]:.4g}" for name in _COUNTED),
            f"{row['seconds']:.1f}",
            "yes" if row["equal"] else "no",
        ]
        for row in rows
    ]
    return markdown_table(header, lines)


async def _run(arguments: argparse.Namespace, name: str) -> tuple[list[Any], list[dict[str, Any]]]:
    options = _options(arguments, name)
    async with Engine(options, worker_only=True) as engine:
        corpus = await engine.register(
            sample_document(engine.worker.tokenizer, arguments.shards, arguments.shard_tokens),
            shard_tokens=arguments.shard_tokens,
            worker_instructions=ParSerPrompts().worker_instructions,
        )
        found, measured = [], []
        for number in range(arguments.rounds):
            before = engine.counters()["worker"]
            done = await corpus.scatter([QUERIES[number % len(QUERIES)]], _scatter_options(arguments))
            after = engine.counters()["worker"]
            found.append([(reply.text, reply.relevance) for reply in done.replies])
            counted = {key: after[key] - before[key] for key in _COUNTED}
            measured.append({"configuration": name, "round": number + 1, "seconds": done.seconds, **counted})
        _check_size(corpus, arguments)
        await corpus.release()
        return found, measured


def _options(arguments: argparse.Namespace, name: str) -> EngineOptions:
    """A budget whose pool holds that share of the shards (all of them where all is to fit), and some pages for rows."""
    given = {**CONFIGURATIONS[name], "worker": arguments.worker, "quantization": arguments.quantization}
    plain = EngineOptions(**given)
    config = resolve_model(plain.worker).config
    ledger = new_ledger(1 << 50)
    plan_memory(ledger, config, None, plain.precision, plain.step_tokens, plain.host_memory_bytes)
    fixed = sum(size for holder, size in ledger.entries.items() if holder != "worker KV pool")
    share = 1.0 if name == "all fits" else arguments.capacity
    pages = int(share * arguments.shards * num_pages_for(arguments.shard_tokens + 64)) + num_pages_for(128)
    pages += max(pages // 7, 16) if share < 1 else 8 * arguments.shards  # the eighth that the pool keeps for rows
    return EngineOptions(**given, memory_bytes=fixed + pages * KVCache.page_bytes(config, plain.precision.kv))


def _scatter_options(arguments: argparse.Namespace) -> ScatterOptions:
    sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
    return ScatterOptions(sampling, gate="likelihood", readers=arguments.readers)


def _check_size(corpus: Corpus, arguments: argparse.Namespace) -> None:
    print(f"{len(corpus.shards)} shards, {corpus.document_tokens} tokens", file=sys.stderr)
    if abs(len(corpus.shards) - arguments.shards) > arguments.shards // 4:
        raise SystemExit(f"{len(corpus.shards)} shards were cut, {arguments.shards} were asked: another text is needed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--shard-tokens", type=int, default=1024)
    parser.add_argument("--capacity", type=float, default=0.5, help="share of the shards that the pool holds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--configurations", default="all fits,lru,sweep,disk")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="int8")
    parser.add_argument("--worker", default="qwen2.5-coder-0.5b")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines of all rounds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
