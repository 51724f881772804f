"""The benchmark does exactly the work it is asked for, and its floor is that work's own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon import bench_round as module
from antiphon.bench_round import BenchRoundOptions, bench_round, round_floor, take_tokens
from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import InputError
from antiphon.engine.model_source import resolve_model
from antiphon.kernels import native
from antiphon.kernels.ops import KernelContext
from antiphon.kernels.registry import choose_kernels
from antiphon.machine import MachineRates
from antiphon.precision import Precision, choose_precision

_FLOAT32 = Precision(torch.float32, torch.float32, torch.float32)
_CONFIG = ModelConfig(
    model_type="qwen2",
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=32,
    max_position=512,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    attention_bias=True,
    qk_norm=False,
)
_OPTIONS = BenchRoundOptions(num_shards=3, shard_tokens=60, suffix_tokens=5, new_tokens=3, num_rounds=2)
_COMPUTE_BOUND = MachineRates(matrix_flops_per_second=1e6, bandwidth_bytes_per_second=1e30)
_MEMORY_BOUND = MachineRates(matrix_flops_per_second=1e30, bandwidth_bytes_per_second=1e6)


def test_each_round_does_the_work_asked_for(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rates of a smaller measurement: what they are is not this test's matter.
    monkeypatch.setattr(module, "measure_rates", lambda dtype: MachineRates(1e12, 1e10))
    result = asyncio.run(bench_round(replace(_OPTIONS, model=str(tiny_model))))
    assert [done.prefill_tokens for done in result.rounds] == [3 * 60 + 3 * 5, 3 * 5]
    assert [done.cached_tokens for done in result.rounds] == [0, 3 * 60]
    assert [done.decode_tokens for done in result.rounds] == [3 * 3, 3 * 3]
    for done in result.rounds:
        assert done.prefill_seconds + done.decode_seconds == pytest.approx(done.seconds)
        assert done.prefill_tokens_per_second == done.prefill_tokens / done.prefill_seconds
        assert done.decode_tokens_per_second == 3 * (3 - 1) / done.decode_seconds
    assert result.peak_bytes > 2**20
    assert result.profile is None
    printed = json.loads(json.dumps(result.to_json()))
    assert {"rounds", "peak_bytes", "floor"} <= set(printed)
    assert len(printed["floor"]["rounds"]) == 2


def test_the_precision_that_was_asked_for_is_the_one_that_runs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_rates", lambda dtype: MachineRates(1e12, 1e10))
    options = replace(_OPTIONS, model=str(tiny_model), kv_cache_dtype="int8", num_rounds=1)
    assert asyncio.run(bench_round(replace(options, dtype="float32"))).dtype == "float32, KV in int8"
    if native.available() is None:
        found = asyncio.run(bench_round(replace(options, quantization="int8")))
        assert found.dtype == "float32, weights and KV in int8"


def runs_fused() -> bool:
    """Whether the precision of this machine's choice has a norm and what follows it in one kernel."""
    chosen = choose_precision("auto", "none", "auto")
    context = KernelContext("cpu", chosen.activations, chosen.weights, chosen.kv, head_dim=16)
    kernels = choose_kernels(context)
    assert (kernels.normed_linear is None) == (kernels.gated_mlp is None)
    return kernels.gated_mlp is not None


def test_a_profile_says_what_each_operation_took(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_rates", lambda dtype: MachineRates(1e12, 1e10))
    result = asyncio.run(bench_round(replace(_OPTIONS, model=str(tiny_model), profile=True)))
    assert result.profile is not None
    for times, seconds in (
        (result.profile.read, result.profile.read_seconds),
        (result.profile.rounds, result.profile.rounds_seconds),
    ):
        assert {"rms_norm", "rotary_and_store", "paged_attention"} < set(times)
        for fused in ("gated_mlp ", "normed_linear "):
            assert any(operation.startswith(fused) for operation in times) == runs_fused()
        assert ("silu_and_mul" in times) != runs_fused()
        assert any(operation.startswith("linear ") for operation in times)
        assert 0 < sum(time.seconds for time in times.values()) < seconds
    assert result.profile.rounds["rms_norm"].num_calls > result.profile.read["rms_norm"].num_calls


def test_prefixes_share_the_instruction_and_no_text_comes_twice(tiny_model: Path) -> None:
    tokens = take_tokens(resolve_model(str(tiny_model)).tokenizer(), _OPTIONS)
    assert [len(prefix) for prefix in tokens.prefixes] == [60, 60, 60]
    assert [len(suffix) for suffix in tokens.suffixes] == [5, 5]
    assert len({tuple(prefix[:57]) for prefix in tokens.prefixes}) == 1
    assert len({tuple(prefix) for prefix in tokens.prefixes}) == 3


def test_a_text_that_is_too_short_is_refused_with_what_would_help(tiny_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("0123456789")
    with pytest.raises(InputError, match=r"19 tokens of text are needed, .*short\.txt has 10"):
        take_tokens(resolve_model(str(tiny_model)).tokenizer(), replace(_OPTIONS, text=text))
    with pytest.raises(InputError, match="cannot read"):
        take_tokens(resolve_model(str(tiny_model)).tokenizer(), replace(_OPTIONS, text=tmp_path / "missing.txt"))


def test_work_of_nothing_is_refused() -> None:
    for name in ("num_shards", "suffix_tokens", "new_tokens", "num_rounds"):
        nothing: dict[str, Any] = {name: 0}
        with pytest.raises(InputError, match="at least 1"):
            replace(_OPTIONS, **nothing)
    with pytest.raises(InputError, match="at least 58"):
        replace(_OPTIONS, shard_tokens=57)


def test_the_prefill_floor_counts_every_product_once() -> None:
    # 2 layers of 8x(2x8 + 2x4) attention and 3x8x16 feed-forward parameters; a head of 8x32.
    linear, head = 2 * (8 * 24 + 3 * 8 * 16), 8 * 32
    positions = sum(60 + 1 + place for place in range(5))
    later = 3 * (2 * linear * 5 + 2 * head + 4 * 2 * 4 * 2 * positions)
    floor = round_floor(_CONFIG, _COMPUTE_BOUND, _FLOAT32, _OPTIONS, first=False)
    assert floor.prefill_flops == later
    assert floor.prefill_seconds == pytest.approx(later / 1e6)
    read = 3 * (2 * linear * 60 + 4 * 2 * 4 * 2 * sum(range(1, 61)))
    assert round_floor(_CONFIG, _COMPUTE_BOUND, _FLOAT32, _OPTIONS, first=True).prefill_flops == later + read


def test_the_decode_floor_reads_weights_and_live_keys_and_values_each_step() -> None:
    weights = 4 * (2 * (8 * 24 + 3 * 8 * 16) + 8 * 32)
    per_token = 2 * 2 * 1 * 4 * 4
    # Three new tokens are two passes: the first token comes with the prefill. They see 66 and 67 tokens.
    expected = 2 * weights + 3 * per_token * (66 + 67)
    floor = round_floor(_CONFIG, _MEMORY_BOUND, _FLOAT32, _OPTIONS, first=False)
    assert floor.decode_bytes == expected
    assert floor.decode_seconds == pytest.approx(expected / 1e6)
    assert floor.seconds == pytest.approx(floor.prefill_seconds + floor.decode_seconds)
    # As stored: int8 weights with a float32 scale for each output, bfloat16 keys and values; the head in two planes.
    narrow = Precision(torch.float32, torch.int8, torch.bfloat16)
    outputs = 2 * (4 * (2 + 2) + 8 + 2 * 16 + 8) + 2 * 32
    expected = 2 * (weights // 4 + 8 * 32 + 4 * outputs) + 3 * per_token // 2 * (66 + 67)
    assert round_floor(_CONFIG, _MEMORY_BOUND, narrow, _OPTIONS, first=False).decode_bytes == expected
    one = round_floor(_CONFIG, _MEMORY_BOUND, _FLOAT32, replace(_OPTIONS, new_tokens=1), first=False)
    assert (one.decode_bytes, one.decode_seconds) == (0, 0.0)
