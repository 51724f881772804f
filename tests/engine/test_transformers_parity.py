"""Greedy output equals transformers' on the same weights, token for token in fp32; bf16 logits within rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from tiny_models import prompt
from tiny_rows import last_logits

from antiphon.engine.errors import ModelError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.kernels import native
from antiphon.kernels.ops import KernelSet, Norm
from antiphon.scheduler.row import Row, RowKind

FAMILIES = [("qwen2", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
LENGTHS = [1, 2, 17, 63, 64, 65, 127, 128, 130]


def hf_greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(token_ids) :].tolist()


def ours_greedy(engine: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    rows = [Row(RowKind.SUFFIX, list(ids), params, order=index) for index, ids in enumerate(prompts)]
    engine.run(rows)
    return [list(row.future.result().new_token_ids) for row in rows]


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_greedy_equals_transformers_over_odd_lengths_in_one_crowd(family: str, tied: bool, only: str | None) -> None:
    model = tiny.random_hf_model(family, tied=tied)
    prompts = [prompt(length) for length in LENGTHS]
    expected = [hf_greedy(model, ids, 12) for ids in prompts]
    assert ours_greedy(tiny.tiny_engine(model, only=only), prompts, 12) == expected


def test_parity_can_fail_with_one_weight_changed() -> None:
    model = tiny.random_hf_model("qwen2")
    prompts = [prompt(length) for length in LENGTHS]
    expected = [hf_greedy(model, ids, 12) for ids in prompts]
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[3] += 3.0
    assert ours_greedy(tiny.tiny_engine(model), prompts, 12) != expected


def test_parity_can_fail_with_positions_shifted() -> None:
    model = tiny.random_hf_model("qwen3")
    ids = prompt(65)
    expected = last_logits(tiny.tiny_engine(model), ids)
    assert not torch.allclose(last_logits(tiny.tiny_engine(model), ids, first_position=1), expected, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_bf16_logits_lie_within_rounding_of_fp32(family: str) -> None:
    """Bound: our error against fp32 is at most 1.5 times that of transformers in bf16, its largest and its mean, over
    the same prompts. bf16 keeps 8 bits and every layer rounds; two right orders of rounding differ no more."""
    model = tiny.random_hf_model(family)
    prompts = [prompt(length) for length in LENGTHS]
    exact = torch.stack([hf_last_logits(model, ids) for ids in prompts])
    engine = tiny.tiny_engine(model, dtype=torch.bfloat16)
    ours = torch.stack([last_logits(engine, ids) for ids in prompts]) - exact
    coarse = tiny.random_hf_model(family).to(torch.bfloat16)
    theirs = torch.stack([hf_last_logits(coarse, ids) for ids in prompts]) - exact
    assert 0 < ours.abs().max() <= 1.5 * theirs.abs().max()
    assert 0 < ours.abs().mean() <= 1.5 * theirs.abs().mean()


@pytest.mark.parametrize(("kv_dtype", "bound"), [(torch.bfloat16, 0.02), (torch.int8, 0.04)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_over_a_narrow_cache_lie_near_those_over_fp32(family: str, kv_dtype: torch.dtype, bound: float) -> None:
    """The rest is fp32. A stored value is off by at most 2^-9 of itself in bf16, by 1 / 254 of its vector's largest
    in int8; logits have moved by less than `bound` of their own spread."""
    model = tiny.random_hf_model(family)
    prompts = [prompt(length) for length in LENGTHS]
    exact = torch.stack([hf_last_logits(model, ids) for ids in prompts])
    engine = tiny.tiny_engine(model, kv_dtype=kv_dtype)
    moved = torch.stack([last_logits(engine, ids) for ids in prompts]) - exact
    assert 0 < moved.std() <= bound * exact.std()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("weight_dtype", "bound"), [(torch.bfloat16, 0.03), (torch.int8, 0.12)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_on_narrow_weights_lie_near_those_of_fp32_with_norms_fused_and_composed(
    family: str, weight_dtype: torch.dtype, bound: float, fused: bool
) -> None:
    """Logits have moved by less than `bound` of their own spread. On AMX tiles activations are rounded too, to bf16 or
    to int8 as the weights are: hence the bounds. A gate taken for an up, or a norm twice as large, goes far beyond."""
    model = tiny.random_hf_model(family)
    prompts = [prompt(length) for length in LENGTHS]
    exact = torch.stack([hf_last_logits(model, ids) for ids in prompts])

    def spread(change: Callable[[KernelSet], KernelSet]) -> float:
        """Of what has moved, beside that of the logits."""
        engine = tiny.tiny_engine(model, weight_dtype=weight_dtype, wrap_kernels=change)
        moved = torch.stack([last_logits(engine, ids) for ids in prompts]) - exact
        return float(moved.std() / exact.std())

    assert 0 < spread(lambda kernels: kernels if fused else composed(kernels)) <= bound
    if fused and native.isa() == "amx":
        assert spread(with_gate_and_up_swapped) > 2 * bound
        assert spread(with_twice_the_norm) > 2 * bound


def composed(kernels: KernelSet) -> KernelSet:
    return replace(kernels, normed_linear=None, gated_mlp=None)


def with_gate_and_up_swapped(kernels: KernelSet) -> KernelSet:
    pack = kernels.gated_mlp
    assert pack is not None
    return replace(kernels, gated_mlp=lambda norm, gate, up, down, block: pack(norm, up, gate, down, block))


def with_twice_the_norm(kernels: KernelSet) -> KernelSet:
    """Before queries, keys and values."""
    pack = kernels.normed_linear
    assert pack is not None
    return replace(
        kernels, normed_linear=lambda norm, weight, bias: pack(Norm(2 * norm.weight, norm.eps), weight, bias)
    )


def hf_last_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0, -1].float()
    return logits


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_scores_are_the_log_probabilities_of_the_next_tokens(family: str) -> None:
    model = tiny.random_hf_model(family)
    ids = prompt(130)
    row = Row(RowKind.SUFFIX, list(ids), SamplingParams(max_new_tokens=0), score_start=90, score_stop=128)
    tiny.tiny_engine(model, step_tokens=50).run([row])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    expected = [float(logprobs[position - 1, ids[position]]) for position in range(90, 128)]
    assert row.scores == pytest.approx(expected, abs=1e-4)


def test_loading_fails_on_a_missing_and_on_an_unused_tensor() -> None:
    model = tiny.random_hf_model("qwen2")
    tensors = tiny.hf_tensors(model)
    config = tiny.config_from_hf(model.config.to_dict())
    kernels = tiny.choose_kernels(tiny.KernelContext("cpu", torch.float32, torch.float32, torch.float32, 16))

    def load(changed: dict[str, torch.Tensor]) -> None:
        tiny.Decoder.load(config, kernels, tiny.StateDictCheckpoint(changed), torch.float32)

    load(tensors)
    missing = {name: value for name, value in tensors.items() if name != "model.layers.2.mlp.up_proj.weight"}
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load(missing)
    with pytest.raises(ModelError, match="1 tensors of the checkpoint are not used"):
        load({**tensors, "model.layers.9.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match="the config asks for"):
        load({**tensors, "model.norm.weight": torch.zeros(5)})
