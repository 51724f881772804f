"""The work of `antiphon bench round` in vLLM's CPU backend, with its prefix cache. Prints one JSON line a turn.

Every round hands all rows (shard and suffix) to the engine at once; the first one so reads the shards, and later ones
find their full blocks cached. Steps are driven here, in this process, so that the time of the last first token and the
peak of memory are known. vLLM binds threads only in worker processes, so that is done here, as it does it. Compiling is
done by a warm-up round on other tokens, which is not timed; the prefix cache is emptied before every turn.

`--dtype w8a8` expects the folder that hf_folder.py writes under that name. Environment: `setup.sh vllm`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from peer_rounds import PeerRound, Work, peer_parser, peer_round, print_result, turns

_PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")


def main() -> int:
    """Load, warm up, then run the rounds of the token file and print the result, in every turn."""
    arguments = _arguments()
    work = Work.read(arguments.tokens)
    _set_environment(arguments)
    import torch
    import vllm

    start = time.perf_counter()
    llm = vllm.LLM(
        model=str(arguments.model),
        tokenizer=str(arguments.model),
        skip_tokenizer_init=True,
        dtype="float32" if arguments.dtype == "float32" else "bfloat16",
        max_model_len=work.max_row_tokens + 8,
        max_num_seqs=len(work.prefixes),
        max_num_batched_tokens=arguments.batch_tokens,
        enable_prefix_caching=True,
        enforce_eager=arguments.eager,
        seed=0,
    )
    engine = llm.llm_engine
    load_seconds = time.perf_counter() - start
    warm_up = Work([[token + 1 for token in prefix] for prefix in work.prefixes[:2]], work.suffixes[:1], 4)
    run_rounds(engine, warm_up)
    preloaded = [name for name in ("iomp5", "tcmalloc") if f"lib{name}" in os.environ.get("LD_PRELOAD", "")]
    about = {
        "engine": f"vLLM {vllm.__version__}",
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "attention": ", ".join(["eager" if arguments.eager else "compiled", *preloaded]),
        "threads": torch.get_num_threads(),
        "load_seconds": load_seconds,
    }
    for _ in turns():
        if not engine.reset_prefix_cache():
            raise SystemExit("vllm_round: the prefix cache could not be emptied")
        print_result(about, *run_rounds(engine, work))
    return 0


def run_rounds(engine: Any, work: Work) -> tuple[list[PeerRound], list[list[list[int]]]]:
    """All rounds; also each round's replies, [rounds][shards][new tokens]."""
    rounds, replies = [], []
    for index, suffix in enumerate(work.suffixes):
        prompts = work.prompts(suffix)
        start = time.perf_counter()
        after_prefill, num_early, taken = _generate(engine, prompts, work.new_tokens, f"{id(work)}-{index}")
        end = time.perf_counter()
        num_prefill = len(prompts) * len(suffix) + (work.num_prefix_tokens if index == 0 else 0)
        num_decode = sum(map(len, taken)) - num_early
        rounds.append(peer_round(start, after_prefill, end, num_prefill, num_decode))
        replies.append(taken)
    return rounds, replies


def _generate(
    engine: Any, prompts: list[list[int]], num_new_tokens: int, name: str
) -> tuple[float, int, list[list[int]]]:
    """When the last row had its first token, how many tokens there were by then, and all rows' tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False)
    for row, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{row}", {"prompt_token_ids": prompt}, params)
    taken: dict[str, list[int]] = {}
    after_prefill, num_early = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            taken[output.request_id] = list(output.outputs[0].token_ids)
        if not after_prefill and sum(map(bool, taken.values())) == len(prompts):
            after_prefill, num_early = time.perf_counter(), sum(map(len, taken.values()))
    return after_prefill, num_early, [taken[f"{name}-{row}"] for row in range(len(prompts))]


def _set_environment(arguments: argparse.Namespace) -> None:
    """Before vllm is imported; starts this script anew with the libraries preloaded that vLLM asks for."""
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    # What vllm.utils.ompmultiprocessing sets for its workers.
    os.environ["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]"
    os.environ["KMP_BLOCKTIME"], os.environ["KMP_TPAUSE"] = "5", "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(arguments.kv_gib))
    found = [path for name in _PRELOADED for path in sorted((Path(sys.prefix) / "lib").glob(name))]
    wanted = [str(path) for path in found if str(path) not in os.environ.get("LD_PRELOAD", "")]
    if wanted:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [*wanted, os.environ.get("LD_PRELOAD", "")]))
        os.execv(sys.executable, [sys.executable, *sys.argv])


def _arguments() -> argparse.Namespace:
    parser = peer_parser(__doc__, ("bfloat16", "float32", "w8a8"), "a folder that hf_folder.py wrote")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="most tokens of one step")
    parser.add_argument("--kv-gib", type=int, default=1, help="memory of the KV cache")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
