"""The embedded models for real: parity with transformers, and a question answered with its evidence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from antiphon import Engine, EngineOptions
from antiphon.engine.model_source import ModelSource, resolve_model
from antiphon.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.embedded

PROMPTS = (
    "Write a Python function that reverses a linked list.",
    "What is the capital of France, and what is it known for?",
    "List the first ten prime numbers.",
    "Explain what a hash table is in two sentences.",
)
NUM_TOKENS = 64


def transformers_twin(source: ModelSource) -> Any:
    """transformers' own model with the same weights: read by us, computed by it."""
    config = source.config
    twin_config = Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(twin_config)
    with source.open() as checkpoint:
        weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(twin_config)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def test_greedy_of_the_real_0_5b_equals_transformers_over_64_tokens_of_4_prompts() -> None:
    source = resolve_model("qwen2.5-coder-0.5b")

    async def ours() -> tuple[list[list[int]], list[list[int]]]:
        options = EngineOptions(worker="qwen2.5-coder-0.5b", dtype="float32", step_tokens=64)
        async with Engine(options, worker_only=True) as engine:
            prompts = [engine.worker.chat.prompt([{"role": "user", "content": text}]) for text in PROMPTS]
            sessions = [engine.session("worker") for _ in prompts]
            for session, prompt in zip(sessions, prompts, strict=True):
                session.append(prompt)
            sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
            done = await asyncio.gather(*(session.generate(sampling) for session in sessions))
            return prompts, [list(generation.token_ids) for generation in done]

    prompts, got = asyncio.run(ours())
    model = transformers_twin(source)
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert output[0, len(prompt) :].tolist() == tokens


_LOAD = """
import asyncio, psutil
from antiphon import Engine, EngineOptions

async def main():
    before = psutil.Process().memory_info().rss
    async with Engine(EngineOptions(worker="qwen2.5-coder-0.5b"), worker_only=True) as engine:
        print(psutil.Process().memory_info().rss - before, engine.worker.weight_bytes)

asyncio.run(main())
"""


def test_no_full_precision_copy_of_the_weights_stays_behind() -> None:
    """Resident memory grows by the weights as held and at most a gigabyte (tokenizer, grammar tables, workspaces);
    a float32 copy beside them would be twice the weights, 2.5 GB, more."""
    done = subprocess.run([sys.executable, "-c", _LOAD], check=True, capture_output=True, text=True)
    grown, weights = map(int, done.stdout.split())
    assert weights * 0.9 < grown < weights + (1 << 30)


def test_a_fact_in_one_place_is_found_with_its_line(tmp_path: Path) -> None:
    """Both models, real grammar, real gate: the answer, its verified quote and its line."""
    from antiphon import ask

    filler = "The committee met again on a Tuesday and adjourned without a vote on the matter of the bridge.\n"
    text = filler * 30 + "The lighthouse at Brandt Point was built by Elias Thorne in 1871.\n" + filler * 30
    path = tmp_path / "notes.txt"
    path.write_text(text)
    answer = ask(path, "Who built the lighthouse at Brandt Point?")
    assert "Elias Thorne" in answer.answer
    right = [item for item in answer.evidence if item.verified and "Thorne" in item.quote]
    assert right
    assert right[0].line == 31
    assert text[right[0].start : right[0].end] == right[0].quote or right[0].quote.lower() in text.lower()
