"""Which shard size serves the embedded pair: does the likelihood gate rank the gold paragraphs' shards first, how fast.

    python benchmarks/shard_size.py --questions 16 --out shard_size.jsonl

Larger shards make the first K hold more text, so recall stands both for the first K shards and for as many shards as
`--budget` tokens hold, which is what a second reader or the driver would have to read.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.document import Document
from antiphon.engine.errors import AntiphonError, InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.evaluation.progress import Progress
from antiphon.evaluation.qa_data import QaDocument, Question, build_document, load_pool, load_questions
from antiphon.evaluation.retrieval import most_relevant, recall
from antiphon.evaluation.summary import markdown_table
from antiphon.evaluation.trial_log import TrialLog
from antiphon.evaluation.trials import gold_shards
from antiphon.methods.backend import ScatterOptions
from antiphon.methods.options import ParSerOptions
from antiphon.methods.parser import ParSer
from antiphon.precision import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS

_ENGINE_FIELDS = ("worker", "threads", "dtype", "quantization", "kv_cache_dtype")
_FIRST = (1, 2, 4, 8)


def main() -> int:
    """Measure what the log lacks, then print the table; 2 on bad input, 130 on Ctrl-C."""
    arguments = _arguments()
    try:
        names = ("paragraphs", "seed", "budget", "readers", "new_tokens", *_ENGINE_FIELDS)
        log = TrialLog(arguments.out, {name: getattr(arguments, name) for name in names})
        questions = load_questions(arguments.data / "hotpotqa_q128.jsonl")[: arguments.questions]
        sizes = [int(size) for size in arguments.sizes.split(",")]
        work = [(q, size) for q in questions for size in sizes if not log.has(_name(size), q.id)]
        if work:
            asyncio.run(_run(arguments, work, log))
    except AntiphonError as error:
        print(f"shard_size: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("shard_size: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(table(log.rows, arguments.budget))
    return 0


def table(rows: Iterable[Mapping[str, Any]], budget_tokens: int) -> str:
    """One line for each shard size: mean recalls in per cent, median seconds."""
    by_size: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_size.setdefault(row["configuration"], []).append(row)
    recalls = (*(f"first {k}" for k in _FIRST), f"in {budget_tokens:,} tokens")
    header = ("configuration", "n", "shards", *(f"recall {name} %" for name in recalls), "read s", "round s")
    lines = []
    for name, trials in by_size.items():
        keys = (*(f"recall_{k}" for k in _FIRST), "recall_budget")
        lines.append(
            [
                name,
                str(len(trials)),
                f"{mean(t['num_shards'] for t in trials):.1f}",
                *(f"{100 * mean(t[key] for t in trials):.1f}" for key in keys),
                *(f"{median(t[key] for t in trials):.1f}" for key in ("read_seconds", "round_seconds")),
            ]
        )
    return markdown_table(header, lines)


async def _run(arguments: argparse.Namespace, work: list[tuple[Question, int]], log: TrialLog) -> None:
    pool = load_pool(arguments.data / "hotpotqa_pool.jsonl")
    progress = Progress(len(work), sys.stderr)
    # Only the worker is measured, so it stands in for the driver too.
    given = {name: getattr(arguments, name) for name in _ENGINE_FIELDS}
    options = EngineOptions(driver=arguments.worker, **given)
    async with Engine(options, worker_only=True) as engine:
        for question, size in work:
            document = build_document(question, pool, num_paragraphs=arguments.paragraphs, seed=arguments.seed)
            row = await _measure(engine, document, question, size, arguments)
            log.append(row)
            progress.step(f"{question.id} {row['configuration']}: recall first 4 {row['recall_4']:.2f}")


async def _measure(
    engine: Engine, document: QaDocument, question: Question, size: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    options = ScatterOptions(
        SamplingParams(max_new_tokens=arguments.new_tokens), gate="likelihood", readers=arguments.readers
    )
    parser = ParSer(engine, ParSerOptions(shard_tokens=size))
    start = time.perf_counter()
    corpus = await parser.register(Document.from_text(document.text))
    read_seconds = time.perf_counter() - start
    try:
        round_ = await corpus.scatter([question.question], options, lambda reply: None)
        gold = gold_shards(document, question, corpus)
        relevances = [reply.relevance for reply in sorted(round_.replies, key=lambda reply: reply.shard)]
        num_in_budget = max(1, arguments.budget // size)
        return {
            "configuration": _name(size),
            "question_id": question.id,
            "num_shards": len(corpus.shards),
            "document_tokens": corpus.document_tokens,
            **{f"recall_{k}": recall(gold, most_relevant(relevances, k)) for k in _FIRST},
            "recall_budget": recall(gold, most_relevant(relevances, num_in_budget)),
            "gold_shards": [sorted(shards) for shards in gold],
            "relevance": relevances,
            "read_seconds": read_seconds,
            "round_seconds": round_.seconds,
        }
    finally:
        await corpus.release()


def _name(size: int) -> str:
    return f"shard-tokens={size}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the evaluation data")
    parser.add_argument("--sizes", default="256,512,1024,4096", help="comma list of shard sizes in tokens")
    parser.add_argument("--questions", type=int, default=16, help="how many from the first on")
    parser.add_argument("--paragraphs", type=int, default=50)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of the most relevant shards that are kept")
    parser.add_argument("--readers", type=int, default=4, help="rows that decode in the timed round")
    parser.add_argument("--new-tokens", type=int, default=64, help="most tokens of a reply in the timed round")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", default="qwen2.5-coder-0.5b")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, continued where it exists")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
