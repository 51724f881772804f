"""The work of `antiphon bench round` in OpenVINO GenAI's continuous batching, with its prefix cache. One JSON a turn.

Every round hands all rows (shard and suffix) to the pipeline at once; the first one so reads the shards, and later ones
find their full blocks cached. Steps are driven here, so that the time of the last first token is known. Nothing empties
the cache, so every turn has a pipeline of its own; loading and warming it up are not timed.

`--export FOLDER` writes FOLDER (what hf_folder.py wrote) as OpenVINO's own format to `--model`, in a process of its own
since that takes more memory than running, and ends. Environment: `setup.sh openvino`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peer_rounds import PeerRound, Work, peer_parser, peer_round, print_result, turns


def main() -> int:
    """Export, or in every turn load, warm up, run the rounds of the token file and print the result."""
    arguments = _arguments()
    if arguments.export:
        export(arguments.export, arguments.model, arguments.dtype)
        return 0
    import openvino
    import openvino_genai

    work = Work.read(arguments.tokens)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching = True
    scheduling.cache_size = arguments.kv_gib
    scheduling.max_num_batched_tokens = arguments.batch_tokens
    scheduling.max_num_seqs = len(work.prefixes)
    properties = {"INFERENCE_NUM_THREADS": threads}
    for _ in turns():
        start = time.perf_counter()
        pipeline = openvino_genai.ContinuousBatchingPipeline(str(arguments.model), scheduling, "CPU", properties)
        load_seconds = time.perf_counter() - start
        run_rounds(pipeline, Work([[token + 1 for token in work.prefixes[0][:64]]], [work.suffixes[0]], 2))
        about = {
            "engine": f"OpenVINO GenAI {openvino_genai.__version__}",
            "torch": f"none, OpenVINO {openvino.__version__}",
            "dtype": arguments.dtype,
            "attention": "paged",
            "threads": threads,
            "load_seconds": load_seconds,
        }
        rounds, replies = run_rounds(pipeline, work)
        del pipeline
        print_result(about, rounds, replies)
    return 0


def export(source: Path, folder: Path, dtype: str) -> None:
    """Writes `folder` whole or not at all, with weights in `dtype`, by optimum-intel; kept where it is there."""
    if folder.is_dir():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tool = Path(sys.executable).with_name("optimum-cli")
    command = [str(tool), "export", "openvino", "--model", str(source), "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", dtype, str(partial)], check=True, stdout=sys.stderr)
    partial.rename(folder)


def run_rounds(pipeline: Any, work: Work) -> tuple[list[PeerRound], list[list[list[int]]]]:
    """All rounds; also each round's replies, [rounds][shards][new tokens]."""
    rounds, replies = [], []
    for index, suffix in enumerate(work.suffixes):
        prompts = work.prompts(suffix)
        start = time.perf_counter()
        after_prefill, num_early, taken = _generate(pipeline, prompts, work.new_tokens)
        end = time.perf_counter()
        num_prefill = len(prompts) * len(suffix) + (work.num_prefix_tokens if index == 0 else 0)
        num_decode = sum(map(len, taken)) - num_early
        rounds.append(peer_round(start, after_prefill, end, num_prefill, num_decode))
        replies.append(taken)
    return rounds, replies


def _generate(pipeline: Any, prompts: list[list[int]], num_new_tokens: int) -> tuple[float, int, list[list[int]]]:
    """When the last row had its first token, how many tokens there were by then, and all rows' tokens."""
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_new_tokens
    config.ignore_eos, config.do_sample = True, False
    handles = [
        pipeline.add_request(row, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        for row, prompt in enumerate(prompts)
    ]
    taken: list[list[int]] = [[] for _ in prompts]
    after_prefill, num_early = 0.0, 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for row, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    taken[row] += list(output.generated_ids)
        if not after_prefill and all(taken):
            after_prefill, num_early = time.perf_counter(), sum(map(len, taken))
    return after_prefill, num_early, taken


def _arguments() -> argparse.Namespace:
    parser = peer_parser(__doc__, ("int8", "fp16", "int4"), "a folder that --export wrote")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write --model from this folder, and end")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens of one step")
    parser.add_argument("--kv-gib", type=int, default=1, help="memory of the KV cache")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
