"""What a cheaper precision costs in quality: perplexity and top tokens of our own engine beside a baseline precision.

    python benchmarks/quantization_quality.py --candidate quantization=int8,kv_cache_dtype=int8 --out quality.jsonl

`--baseline` and `--candidate` are engine options (`dtype`, `quantization`, `kv_cache_dtype`). N windows of W tokens,
cut at even distances out of HotpotQA's Wikipedia paragraphs (../shared/data) or, with `--text stdlib` or where those
are not there, out of Python's standard library; nothing is tuned on this text. Every window is computed from an empty
cache. Prints a table, `--json` the figures. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.engine.batch import Batch, Phase
from antiphon.engine.errors import AntiphonError, InputError
from antiphon.engine.model_source import resolve_model
from antiphon.engine.pages import num_pages_for
from antiphon.engine.tokenizer import Tokenizer
from antiphon.evaluation.progress import Progress
from antiphon.evaluation.qa_data import load_pool
from antiphon.evaluation.quality import Quality, WindowScores, compare
from antiphon.evaluation.summary import markdown_table
from antiphon.evaluation.trial_log import TrialLog
from antiphon.machine import detect_machine
from antiphon.scheduler.lane import Lane

_OPTION_NAMES = ("dtype", "quantization", "kv_cache_dtype")


def main() -> int:
    """Measure what the log lacks, then print; 2 on bad input, 130 on Ctrl-C."""
    arguments = _arguments()
    try:
        text_name, windows = take_windows(resolve_model(arguments.model).tokenizer(), arguments)
        settings = {
            "model": arguments.model,
            "text": text_name,
            "windows": arguments.windows,
            "tokens": arguments.tokens,
        }
        log = TrialLog(arguments.out, settings)
        scores = [_scores(arguments, flags, windows, log) for flags in (arguments.baseline, arguments.candidate)]
    except AntiphonError as error:
        print(f"quantization_quality: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("quantization_quality: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    quality = compare(*scores, windows)
    if arguments.json:
        names = {"baseline": arguments.baseline, "candidate": arguments.candidate}
        print(json.dumps(settings | names | quality.to_json()))
    else:
        print(report(quality, arguments, text_name))
    return 0


def engine_options(model: str, flags: str, threads: int | None) -> EngineOptions:
    """`dtype=bfloat16,quantization=int8` as options; raises `InputError` for a name or value that is not known."""
    given = dict(part.partition("=")[::2] for part in flags.split(",") if part)
    unknown = sorted(set(given) - set(_OPTION_NAMES))
    if unknown:
        raise InputError(f"option {unknown[0]!r} is unknown, known are {', '.join(_OPTION_NAMES)}")
    chosen: dict[str, Any] = dict(given)
    return replace(EngineOptions(worker=model, threads=threads), **chosen)


def take_windows(tokenizer: Tokenizer, arguments: argparse.Namespace) -> tuple[str, list[list[int]]]:
    """The text's name, and the windows, from places at even distances; no two overlap."""
    name, texts = _texts(arguments.text, arguments.data)
    tokens = [token for text in texts for token in tokenizer.encode(text)]
    step = len(tokens) // arguments.windows
    if step < arguments.tokens:
        needed = arguments.windows * arguments.tokens
        raise InputError(
            f"{needed:,} tokens are needed, {name} has {len(tokens):,}: ask for fewer --windows or --tokens"
        )
    return name, [tokens[i * step : i * step + arguments.tokens] for i in range(arguments.windows)]


def score_window(lane: Lane, window: Sequence[int], piece_tokens: int) -> WindowScores:
    """All next-token predictions of a window from an empty cache, `piece_tokens` positions of logits at a time.

    Runs on the core's thread.
    """
    pages = lane.store.allocate(num_pages_for(len(window)))
    logprobs: list[float] = []
    top_tokens: list[int] = []
    try:
        # The last token has no next one here: it is not computed at all.
        for first in range(0, len(window) - 1, piece_tokens):
            last = min(first + piece_tokens, len(window) - 1)
            logits = lane.runner.launch(_batch(window, first, last, pages)).result().logits
            targets = torch.tensor(window[first + 1 : last + 1])
            logprobs += (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)).tolist()
            top_tokens += logits.argmax(dim=1).tolist()
    finally:
        lane.store.release(pages)
    return WindowScores(logprobs, top_tokens)


def report(quality: Quality, arguments: argparse.Namespace, text_name: str) -> str:
    """The machine, the text, the command and the table."""
    machine = detect_machine()
    ratio, agreement = quality.perplexity_ratio, quality.agreement
    lines = [
        [
            "baseline",
            arguments.baseline,
            f"{quality.baseline_perplexity:.4f}",
            "1",
            f"{100 * quality.baseline_top1:.2f}",
            "100",
        ],
        [
            "candidate",
            arguments.candidate,
            f"{quality.candidate_perplexity:.4f}",
            f"{ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f})",
            f"{100 * quality.candidate_top1:.2f}",
            f"{100 * agreement.value:.2f} ({100 * agreement.low:.2f} to {100 * agreement.high:.2f})",
        ],
    ]
    header = ("", "options", "perplexity", "ratio", "text's token on top %", "same top token %")
    return "\n".join(
        [
            f"{machine.cpu}, {', '.join(machine.instruction_sets)}; {arguments.model}",
            f"{quality.num_windows} windows of {arguments.tokens} tokens of {text_name}; 95 % intervals over windows",
            f"`{shlex.join(['python', *sys.argv])}`",
            "",
            markdown_table(header, lines),
        ]
    )


def _scores(
    arguments: argparse.Namespace, flags: str, windows: Sequence[Sequence[int]], log: TrialLog
) -> list[WindowScores]:
    missing = [index for index in range(len(windows)) if not log.has(flags, f"window-{index}")]
    if missing:
        asyncio.run(_measure(arguments, flags, windows, missing, log))
    rows = {row["question_id"]: row for row in log.rows if row["configuration"] == flags}
    found = [rows[f"window-{index}"] for index in range(len(windows))]
    return [WindowScores(row["logprobs"], row["top_tokens"]) for row in found]


async def _measure(
    arguments: argparse.Namespace, flags: str, windows: Sequence[Sequence[int]], missing: Sequence[int], log: TrialLog
) -> None:
    options = engine_options(arguments.model, flags, arguments.threads)
    progress = Progress(len(missing), sys.stderr)
    async with Engine(options, worker_only=True) as engine:
        client = engine.worker.client
        for index in missing:
            window = windows[index]
            scores = await client.call(lambda window=window: score_window(client.lane, window, arguments.piece_tokens))
            row = {"logprobs": scores.logprobs, "top_tokens": scores.top_tokens}
            log.append(
                {"configuration": flags, "question_id": f"window-{index}", "precision": str(options.precision), **row}
            )
            progress.step(f"{flags}: window {index}, mean log-probability {np.mean(scores.logprobs):.4f}")


def _batch(window: Sequence[int], first: int, last: int, pages: Sequence[int]) -> Batch:
    count = last - first
    nothing = np.empty(0, dtype=np.int64)
    return Batch(
        phase=Phase.EXTEND,
        token_ids=np.asarray(window[first:last], dtype=np.int64),
        positions=np.arange(first, last, dtype=np.int64),
        row_starts=np.asarray([0, count], dtype=np.int64),
        context_tokens=np.asarray([first], dtype=np.int64),
        block_tables=np.asarray([pages], dtype=np.int32),
        logit_tokens=np.arange(count, dtype=np.int64),
        score_tokens=nothing,
        score_targets=nothing,
    )


def _texts(text: str, data: Path) -> tuple[str, Iterator[str]]:
    pool = data / "hotpotqa_pool.jsonl"
    if text == "hotpotqa" or (text == "auto" and pool.is_file()):
        paragraphs = load_pool(pool).values()
        return "HotpotQA's Wikipedia paragraphs", (f"{p.title}\n{p.text}\n\n" for p in paragraphs)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    version = ".".join(map(str, sys.version_info[:3]))
    return f"Python {version}'s standard library", (path.read_text(encoding="utf-8") for path in sources)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--baseline", default="dtype=bfloat16", help="engine options, name=value,name=value")
    parser.add_argument("--candidate", required=True, help="the same, of the precision in question")
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--piece-tokens", type=int, default=128, help="positions whose logits are held at once")
    parser.add_argument("--text", choices=("auto", "hotpotqa", "stdlib"), default="auto")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the evaluation data")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, continued where it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
