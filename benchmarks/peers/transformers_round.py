"""The work of `antiphon bench round` in transformers: one static batch, its DynamicCache kept between rounds.

Round 1 prefills the shards in sub-batches and keeps their cache; every round then sends one suffix to all shards as one
batch, decodes greedily with end tokens ignored, and crops the cache back to the shards. Prints one JSON object.
Takes a folder (hf_folder.py) or a GGUF file, which needs `accelerate` and is dequantised: dense products in `--dtype`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from peer_rounds import PeerRound, Work, peer_parser, peer_round, print_result, turns
from transformers import AutoModelForCausalLM, DynamicCache, GgufConfig


def main() -> int:
    """Load, warm up, then run the rounds of the token file and print the result, in every turn."""
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    work = Work.read(arguments.tokens)
    start = time.perf_counter()
    model = load_model(arguments.model, getattr(torch, arguments.dtype))
    load_seconds = time.perf_counter() - start
    prefixes = torch.tensor(work.prefixes)
    about = {
        "engine": f"transformers {transformers.__version__}",
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "load_seconds": load_seconds,
    }
    with torch.inference_mode():
        model(prefixes[:1, :64], logits_to_keep=1)
        for _ in turns():
            rounds, replies = run_rounds(model, prefixes, work.suffixes, work.new_tokens, arguments.prefill_tokens)
            print_result(about, rounds, replies)
    return 0


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """A GGUF file (dequantised to dense weights) or a safetensors folder, with torch's sdpa attention."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if path.suffix == ".gguf":
        folder = str(path.parent)
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    else:
        folder = str(path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    model.train(False)
    found = {parameter.dtype for parameter in model.parameters()}
    if found != {dtype}:
        raise SystemExit(f"transformers_round: weights are {found}, {dtype} was asked")
    return model


def run_rounds(
    model: Any, prefixes: torch.Tensor, suffixes: list[list[int]], num_new_tokens: int, num_prefill_tokens: int
) -> tuple[list[PeerRound], list[list[list[int]]]]:
    """All rounds over `prefixes` [shards, tokens]; also each round's replies, [rounds][shards][new tokens]."""
    num_shards, num_prefix_tokens = prefixes.shape
    start = time.perf_counter()
    cache = read_shards(model, prefixes, max(1, num_prefill_tokens // num_prefix_tokens))
    num_read_tokens = prefixes.numel()
    rounds, replies = [], []
    for suffix in suffixes:
        batch = torch.tensor([suffix]).expand(num_shards, -1)
        output = model(batch, past_key_values=cache, logits_to_keep=1)
        next_ids = output.logits[:, -1].argmax(-1, keepdim=True)
        after_prefill = time.perf_counter()
        taken = [next_ids]
        for _ in range(num_new_tokens - 1):
            output = model(next_ids, past_key_values=cache, logits_to_keep=1)
            next_ids = output.logits[:, -1].argmax(-1, keepdim=True)
            taken.append(next_ids)
        end = time.perf_counter()
        cache.crop(num_prefix_tokens - cache.get_seq_length())
        num_prefill = num_read_tokens + batch.numel()
        rounds.append(peer_round(start, after_prefill, end, num_prefill, num_shards * (num_new_tokens - 1)))
        replies.append(torch.cat(taken, dim=1).tolist())
        num_read_tokens, start = 0, time.perf_counter()
    return rounds, replies


def read_shards(model: Any, prefixes: torch.Tensor, num_rows: int) -> DynamicCache:
    """Prefill `num_rows` shards at a time, and join the parts' caches to one of all shards."""
    parts = []
    for batch in torch.split(prefixes, num_rows):
        part = DynamicCache(config=model.config)
        model(batch, past_key_values=part, logits_to_keep=1)
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    joined = DynamicCache(config=model.config)
    for index in range(len(parts[0].layers)):
        layers: list[Any] = [part.layers[index] for part in parts]
        joined.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
        for layer in layers:
            layer.reset()
    return joined


def _arguments() -> argparse.Namespace:
    parser = peer_parser(__doc__, ("float32", "bfloat16"), "a .gguf file or a safetensors folder")
    parser.add_argument("--prefill-tokens", type=int, default=4096, help="most tokens of a sub-batch in the reading")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
