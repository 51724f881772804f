"""Multi-hop QA under several configurations: resumable JSON lines, and a Markdown table of all that is in them.

    python benchmarks/hotpotqa.py --questions 8 --configurations default,gates,full-context --out trials.jsonl

A question's document is read once and asked under every configuration in turn, so `read s` is the same in all its rows.
The second reader's own reading counts as part of the first configuration that uses it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.document import Document
from antiphon.engine.errors import AntiphonError, InputError
from antiphon.evaluation.configurations import Configuration, parse_configurations
from antiphon.evaluation.metrics import sub_em_strict
from antiphon.evaluation.progress import Progress
from antiphon.evaluation.qa_data import Paragraph, QaDocument, Question, build_document, load_pool, load_questions
from antiphon.evaluation.summary import markdown_summary
from antiphon.evaluation.trial_log import TrialLog
from antiphon.evaluation.trials import ReadDocument, run_trial
from antiphon.methods.options import ParSerOptions
from antiphon.methods.parser import ParSer
from antiphon.precision import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS

_ENGINE_FIELDS = ("worker", "driver", "threads", "dtype", "quantization", "kv_cache_dtype")
DATA_SETS = ("hotpotqa", "2wikimultihopqa")


@dataclass(frozen=True)
class Work:
    """A question and the configurations that its log still lacks."""

    question: Question
    configurations: tuple[Configuration, ...]


def main() -> int:
    """Run what the log lacks, then print the table; 2 on bad input, 130 on Ctrl-C."""
    arguments = _parser().parse_args()
    try:
        questions = load_questions(arguments.data / f"{arguments.dataset}_q128.jsonl")
        configurations = parse_configurations(arguments.configurations)
        log = TrialLog(arguments.out, _settings(arguments))
        work = _outstanding(log, select_questions(questions, arguments.questions), configurations)
        if work:
            pool = load_pool(arguments.data / f"{arguments.dataset}_pool.jsonl")
            asyncio.run(_run(arguments, pool, work, log))
    except AntiphonError as error:
        print(f"hotpotqa: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("hotpotqa: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(markdown_summary(log.rows))
    return 0


def select_questions(questions: list[Question], text: str) -> list[Question]:
    """The first N (`20`) or a range (`8:20`) of the questions; raises `InputError` where that is empty or malformed."""
    start, separator, stop = text.rpartition(":")
    try:
        chosen = questions[int(start or 0) : int(stop) if stop else None] if separator else questions[: int(text)]
    except ValueError as error:
        raise InputError(f"--questions {text!r}: give a count such as 20, or a range such as 8:20") from error
    if not chosen:
        raise InputError(f"--questions {text!r}: none chosen, there are {len(questions)}")
    return chosen


async def _run(arguments: argparse.Namespace, pool: dict[int, Paragraph], work: list[Work], log: TrialLog) -> None:
    progress = Progress(sum(len(item.configurations) for item in work), sys.stderr)
    options = EngineOptions(**{name: getattr(arguments, name) for name in _ENGINE_FIELDS})
    async with Engine(options) as engine:
        for item in work:
            document = build_document(item.question, pool, num_paragraphs=arguments.paragraphs, seed=arguments.seed)
            await _ask_all(engine, item, document, arguments, log, progress)


async def _ask_all(
    engine: Engine,
    item: Work,
    document: QaDocument,
    arguments: argparse.Namespace,
    log: TrialLog,
    progress: Progress,
) -> None:
    read = None
    if not all(configuration.full_context for configuration in item.configurations):
        read = await _read(engine, document, arguments.shard_tokens)
    try:
        for configuration in item.configurations:
            row = await run_trial(engine, read, document, item.question, configuration, arguments.readers)
            log.append(row)
            right = "right" if sub_em_strict(row["prediction"], row["answers"]) else "wrong"
            outcome = row.get("error") or f"{row['prediction']!r} for {row['answers'][0]!r}, {right}"
            progress.step(f"{item.question.id} {configuration.name}: {outcome}, {row['seconds']['total']:.1f} s")
    finally:
        if read is not None:
            await read.corpus.release()


async def _read(engine: Engine, document: QaDocument, shard_tokens: int) -> ReadDocument:
    parser = ParSer(engine, ParSerOptions(shard_tokens=shard_tokens))
    start = time.perf_counter()
    corpus = await parser.register(Document.from_text(document.text))
    return ReadDocument(document, corpus, time.perf_counter() - start)


def _outstanding(log: TrialLog, questions: list[Question], configurations: tuple[Configuration, ...]) -> list[Work]:
    work = []
    for question in questions:
        missing = tuple(c for c in configurations if not log.has(c.name, question.id))
        if missing:
            work.append(Work(question, missing))
    return work


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("dataset", "paragraphs", "seed", "shard_tokens", "readers", *_ENGINE_FIELDS)
    # The method's defaults too: when they change, new trials are not those that the log holds.
    defaults = asdict(ParSerOptions(shard_tokens=arguments.shard_tokens))
    return {name: getattr(arguments, name) for name in names} | {f"parser_{key}": defaults[key] for key in defaults}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the evaluation data")
    parser.add_argument("--dataset", choices=DATA_SETS, default="hotpotqa")
    parser.add_argument("--paragraphs", type=int, default=50, help="paragraphs of each document")
    parser.add_argument("--questions", default="20", help="how many from the first on, or a range such as 0:8")
    parser.add_argument("--configurations", default="default", help="comma list; see evaluation/configurations.py")
    parser.add_argument("--shard-tokens", type=int, default=ParSerOptions().shard_tokens, help="most tokens of a shard")
    parser.add_argument("--readers", type=int, default=4, help="rows of a query that go on, in the gate configurations")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and order of paragraphs")
    parser.add_argument("--worker", default="qwen2.5-coder-0.5b")
    parser.add_argument("--driver", default="qwen2.5-coder-1.5b")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file of trials, continued where it exists")
    return parser


if __name__ == "__main__":
    sys.exit(main())
