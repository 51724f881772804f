"""Time to the answer with overlap and without, in turns on one engine; each run reads the document anew.

python benchmarks/overlap.py PATH… QUESTION [--runs 3] [--quantization int8] [--trace FILE]

A line a run: seconds to the answer, of reading, of rounds, of the driver's turns, and the answer's first words.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from antiphon import Answer, Document, Engine, EngineOptions, ParSer, ParSerOptions


async def ask(engine: Engine, document: Document, question: str, *, overlap: bool) -> Answer:
    """One question of a document that nobody has read, asked of a driver that remembers nothing."""
    for model in {engine.worker.name: engine.worker, engine.driver.name: engine.driver}.values():
        await model.client.call(model.client.lane.store.clear_cached)
    return await ParSer(engine, ParSerOptions(overlap=overlap)).ask(document, question)


async def compare(document: Document, question: str, options: EngineOptions, num_runs: int) -> None:
    """Runs both ways `num_runs` times in turns, then prints medians and spread."""
    totals: dict[bool, list[float]] = {True: [], False: []}
    async with Engine(options) as engine:
        for number in range(2 * num_runs):
            overlap = number % 2 == 0
            answer = await ask(engine, document, question, overlap=overlap)
            seconds = answer.seconds
            totals[overlap].append(seconds.total)
            print(
                f"{_name(overlap)}  answer after {seconds.total:.2f} s  read {seconds.read:.2f}  rounds "
                f"{seconds.rounds:.2f}  driver {seconds.driver:.2f}  {len(answer.rounds)} rounds of "
                f"{[len(record.queries) for record in answer.rounds]} queries  {answer.answer[:60]!r}",
                flush=True,
            )
    print(f"{answer.usage.document_tokens:,} tokens in {answer.usage.shards} shards")
    for overlap, values in totals.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{_name(overlap)}  median {statistics.median(values):.2f} s ({spread}, {num_runs} runs)")


def _name(overlap: bool) -> str:
    return "overlap   " if overlap else "no overlap"


def main(arguments: Sequence[str]) -> int:
    """Reads the arguments and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("question")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args(arguments)
    options = EngineOptions(quantization=given.quantization, trace=given.trace)
    asyncio.run(compare(Document.from_paths(given.paths), given.question, options, given.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
