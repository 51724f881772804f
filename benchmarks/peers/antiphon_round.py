"""The work of `antiphon bench round` over a token file, in turns with the peers. Prints one JSON line a turn.

`--dtype` also takes `int8` (quantised weights) and `int8-kv8` (the KV cache too).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import torch
from peer_rounds import PeerRound, Work, peer_parser, peer_round, print_result, turns

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.engine.sampling_params import SamplingParams
from antiphon.loaded_model import LoadedModel

_INT8 = {"int8": ("int8", "auto"), "int8-kv8": ("int8", "int8")}


async def main() -> int:
    """Load, warm up, then run the rounds of the token file and print the result, in every turn."""
    arguments = _arguments()
    work = Work.read(arguments.tokens)
    quantization, kv_cache_dtype = _INT8.get(arguments.dtype, ("none", "auto"))
    options = EngineOptions(
        worker=str(arguments.model),
        threads=arguments.threads,
        dtype="auto" if arguments.dtype in _INT8 else arguments.dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    async with Engine(options, worker_only=True) as engine:
        await run_rounds(engine.worker, Work([[token + 1 for token in work.prefixes[0][:64]]], [work.suffixes[0]], 2))
        about = {
            "dtype": str(options.precision),
            "threads": torch.get_num_threads(),
            "load_seconds": engine.load_seconds,
        }
        for _ in turns():
            print_result(about, *await run_rounds(engine.worker, work))
    return 0


async def run_rounds(worker: LoadedModel, work: Work) -> tuple[list[PeerRound], list[list[list[int]]]]:
    """All rounds; also each round's replies, [rounds][shards][new tokens]. Nothing read is kept afterwards."""
    sampling = SamplingParams(max_new_tokens=work.new_tokens, ignore_eos=True)
    start = time.perf_counter()
    read = await asyncio.gather(*(worker.read_counted(prefix) for prefix in work.prefixes))
    read_seconds, read_tokens = time.perf_counter() - start, sum(count for _, count in read)
    if read_tokens != work.num_prefix_tokens:
        raise SystemExit(
            f"antiphon_round: {read_tokens} of {work.num_prefix_tokens} tokens were read, others were kept"
        )
    prefixes = [prefix for prefix, _ in read]
    rounds, replies = [], []
    for suffix in work.suffixes:
        result = await worker.round(prefixes, [suffix], sampling)
        after_prefill = read_seconds + result.prefill_seconds
        num_decode = result.decode_tokens - len(result.replies)
        end = read_seconds + result.seconds
        rounds.append(peer_round(0.0, after_prefill, end, read_tokens + result.prefill_tokens, num_decode))
        replies.append([list(reply.token_ids) for reply in result.replies])
        read_seconds, read_tokens = 0.0, 0
    worker.release(prefixes)
    return rounds, replies


def _arguments() -> argparse.Namespace:
    dtypes = ("auto", "float32", "bfloat16", *_INT8)
    return peer_parser(__doc__, dtypes, "a .gguf file or a safetensors folder").parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
