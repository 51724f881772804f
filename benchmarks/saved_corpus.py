"""A corpus is read once, saved, and asked by an engine that never read it: how much sooner, and whether the bits agree.

    python benchmarks/saved_corpus.py --tokens 131072 --quantization int8

Prints the seconds of reading and saving, and, on a second engine, from registering the saved corpus to the first row's
first token and to the end of the first round, beside the same on the engine that has read it. What is saved lies in a
folder of its own, which is removed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.bench_round import sample_document
from antiphon.corpus import Corpus
from antiphon.engine.cache_folder import models_folder
from antiphon.engine.sampling_params import SamplingParams
from antiphon.evaluation.summary import markdown_table
from antiphon.methods.backend import ScatterOptions
from antiphon.methods.options import ParSerOptions
from antiphon.precision import QUANTIZATIONS
from antiphon.saving import read_and_save

QUERY = "Who contributed the authentication code for imaplib?"


def main() -> int:
    """Read and save, ask, ask again from the disk, and compare."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        Path(folder, "models").symlink_to(models_folder())
        os.environ["ANTIPHON_CACHE"] = folder
        options = EngineOptions(worker=arguments.worker, quantization=arguments.quantization)
        read, expected = asyncio.run(_read_and_ask(options, arguments))
        asked, found = asyncio.run(_read_and_ask(options, arguments))
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    header = ("", "tokens computed", "register s", "first token after s", "first round s")
    lines = [[name, *(f"{value:,.2f}" for value in row)] for name, row in (("read and saved", read), ("saved", asked))]
    print(markdown_table(header, lines))
    print(f"{num_bytes / 2**30:.2f} GiB of states; first token {read[2] / asked[2]:.0f} times as soon; ", end="")
    print("same bits" if found == expected else "OTHER BITS")
    return 0 if found == expected else 1


async def _read_and_ask(
    options: EngineOptions, arguments: argparse.Namespace
) -> tuple[tuple[float, ...], list[tuple[str, float | None]]]:
    async with Engine(options, worker_only=True) as engine:
        document = sample_document(engine.worker.tokenizer, arguments.tokens // 512, 512)
        started = time.perf_counter()
        corpus = await read_and_save(document, "bench", engine, ParSerOptions(shard_tokens=arguments.shard_tokens))
        registered = time.perf_counter()
        first, done = await _scatter(corpus, arguments)
        seconds = (registered - started, first - started, done.seconds)
        await corpus.release()
    return (corpus.prefill_tokens, *seconds), [(reply.text, reply.relevance) for reply in done.replies]


async def _scatter(corpus: Corpus, arguments: argparse.Namespace) -> tuple[float, Any]:
    """When the first row had its first token, and the round."""
    firsts: list[float] = []
    how = ScatterOptions(SamplingParams(max_new_tokens=arguments.new_tokens), gate="likelihood", readers=3)
    done = await corpus.scatter([QUERY], how, lambda reply: firsts.append(time.perf_counter()))
    return min(firsts), done


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--shard-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="int8")
    parser.add_argument("--worker", default="qwen2.5-coder-0.5b")
    parser.add_argument("--folder", type=Path, default=None, help="where the states are written; the system's own")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
