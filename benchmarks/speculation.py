"""Replies with drafts and without, in turns, over real questions: tokens a step, seconds of decoding, equal replies.

    python benchmarks/speculation.py --questions 0:4 --quantization int8 --out speculation.jsonl

Each question is asked of its document's shards in three ways: the worker's own replies of the likeliest 3 shards
(`worker`), those of all shards at once (`worker-all`), and the second reader's of the likeliest 3 (`second`). A
configuration runs with and without drafts by turns; seconds are those of DECODE steps, whole. Lines are added to the
file; the table is of all that is in it. The first run of each is left out of the medians: the second reader reads then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from hotpotqa import select_questions

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.corpus import Corpus
from antiphon.document import Document
from antiphon.evaluation.qa_data import build_document, load_pool, load_questions
from antiphon.evaluation.summary import markdown_table
from antiphon.methods.backend import ScatterOptions
from antiphon.methods.options import ParSerOptions
from antiphon.methods.prompts import ParSerPrompts
from antiphon.precision import QUANTIZATIONS

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "worker": {"second_reader": False},
    "worker-all": {"second_reader": False, "gate": "none", "readers": None},
    "second": {"second_reader": True},
}
_COUNTED = ("decode_steps", "decode_seconds", "drafted_tokens", "accepted_tokens")


def main() -> int:
    """Run every question asked for and print the table."""
    arguments = _arguments()
    asyncio.run(_run(arguments))
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    print(table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each configuration and precision: sums over its questions of the runs' medians."""
    header = (
        "replies",
        "weights",
        "questions",
        "tokens",
        "steps without → with",
        "drafted, right",
        "decode s without → with",
        "saved",
        "worst question s with/without",
        "equal",
    )
    names = ("configuration", "quantization")
    ordered = sorted(rows, key=lambda row: [row[name] for name in (*names, "question")])
    return markdown_table(
        header, [_line(*key, list(group)) for key, group in groupby(ordered, lambda row: tuple(row[n] for n in names))]
    )


def _line(configuration: str, quantization: str, rows: list[dict[str, Any]]) -> list[str]:
    totals = {speculation: dict.fromkeys((*_COUNTED, "tokens"), 0.0) for speculation in (False, True)}
    worst, equal, num_questions = 0.0, True, 0
    for _, group in groupby(rows, lambda row: row["question"]):
        runs = list(group)
        num_questions += 1
        equal &= len({json.dumps(run["replies"]) for run in runs}) == 1
        kept = {side: [run for run in runs if run["speculation"] == side and run["run"] > 0] for side in totals}
        for side, total in totals.items():
            for name in total:
                total[name] += statistics.median(run[name] for run in kept[side])
        seconds = {side: statistics.median(run["decode_seconds"] for run in kept[side]) for side in totals}
        if seconds[False]:
            worst = max(worst, seconds[True] / seconds[False])
    without, drafted = totals[False], totals[True]
    return [
        configuration,
        quantization,
        str(num_questions),
        f"{drafted['tokens']:.0f}",
        f"{without['decode_steps']:.0f} → {drafted['decode_steps']:.0f}",
        f"{drafted['drafted_tokens']:.0f}, {drafted['accepted_tokens'] / max(1, drafted['drafted_tokens']):.0%}",
        f"{without['decode_seconds']:.2f} → {drafted['decode_seconds']:.2f}",
        f"{1 - drafted['decode_seconds'] / without['decode_seconds']:.0%}" if without["decode_seconds"] else "–",
        f"{worst:.2f}",
        "yes" if equal else "no",
    ]


async def _run(arguments: argparse.Namespace) -> None:
    questions = load_questions(arguments.data / "hotpotqa_q128.jsonl")
    pool = load_pool(arguments.data / "hotpotqa_pool.jsonl")
    options = EngineOptions(quantization=arguments.quantization, disk_memory_bytes=0)
    async with Engine(options) as engine:
        for question in select_questions(questions, arguments.questions):
            document = build_document(question, pool, num_paragraphs=arguments.paragraphs, seed=0)
            corpus = await engine.register(
                Document.from_text(document.text),
                shard_tokens=arguments.shard_tokens,
                worker_instructions=ParSerPrompts().worker_instructions,
            )
            for name in arguments.configurations.split(","):
                about = {"configuration": name, "quantization": arguments.quantization, "question": question.id}
                runs = [
                    {**about, "run": number, **await _measure(engine, corpus, question.question, name, speculation)}
                    for number in range(arguments.runs + 1)
                    for speculation in (False, True)[:: 1 if number % 2 else -1]
                ]
                with arguments.out.open("a") as out:
                    out.writelines(json.dumps(run) + "\n" for run in runs)
            print(f"{question.id}: {len(corpus.shards)} shards", file=sys.stderr, flush=True)
            await corpus.release()


async def _measure(engine: Engine, corpus: Corpus, question: str, name: str, speculation: bool) -> dict[str, Any]:
    """One round."""
    model = engine.driver if name == "second" else engine.worker
    lane, before = model.client.lane, model.client.lane.counters.as_dict()
    await model.client.call(lambda: setattr(lane.speculator, "enabled", speculation))
    options = ParSerOptions()
    given = {"gate": options.gate, "readers": options.readers, **CONFIGURATIONS[name]}
    done = await corpus.scatter([question], ScatterOptions(options.worker_sampling(), **given))
    after = lane.counters.as_dict()
    return {
        "speculation": speculation,
        **{counter: after[counter] - before[counter] for counter in _COUNTED},
        "tokens": done.decode_tokens,
        "replies": [reply.text for reply in done.replies],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the evaluation data")
    parser.add_argument("--questions", default="0:4", help="how many from the first on, or a range such as 4:8")
    parser.add_argument("--paragraphs", type=int, default=20, help="paragraphs of each document")
    parser.add_argument("--shard-tokens", type=int, default=ParSerOptions().shard_tokens)
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--runs", type=int, default=3, help="with and without drafts each, after a first one")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines of all runs; added to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
