"""Rotations folded into the weights leave the logits as they are; what they rotate is what lies between."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch
from tiny_models import prompt
from tiny_rows import last_logits

from antiphon.engine.config import config_from_hf
from antiphon.engine.models import folding
from antiphon.engine.models.decoder import Decoder
from antiphon.engine.models.folding import Folding, RotatedFolding
from antiphon.kernels import native
from antiphon.kernels.ops import KernelContext
from antiphon.kernels.registry import choose_kernels

FAMILIES = [("qwen2", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
LENGTHS = [1, 17, 65, 130]
WIDE = torch.float32


def model_with_gains(family: str, tied: bool) -> Any:
    """Norms that are not ones, q and k norms among them, so that a gain left out shows."""
    model = tiny.random_hf_model(family, tied=tied)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def moved(model: Any, rotated: bool | None, **options: Any) -> float:
    """How far logits are from those of the weights as they are, in float32, beside their spread."""
    prompts = [prompt(length) for length in LENGTHS]
    plain, other = tiny.tiny_engine(model), tiny.tiny_engine(model, rotated=rotated, **options)
    exact = torch.stack([last_logits(plain, ids) for ids in prompts])
    return float((torch.stack([last_logits(other, ids) for ids in prompts]) - exact).abs().max() / exact.std())


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_rotated_logits_equal_those_of_the_weights_as_they_are(family: str, tied: bool, only: str | None) -> None:
    assert moved(model_with_gains(family, tied), rotated=True, only=only) < 2e-4


def test_biases_of_o_are_rotated_too() -> None:
    """Qwen3 with attention biases: of q, k, v and o."""
    torch.manual_seed(0)
    base = tiny.random_hf_model("qwen3").config
    model = type(tiny.random_hf_model("qwen3"))(type(base)(**{**base.to_dict(), "attention_bias": True})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    assert moved(model, rotated=True) < 2e-4


@pytest.mark.parametrize("part", ["gain", "values", "attention_out", "mlp_down", "embedding", "behind_norm"])
def test_the_comparison_can_fail_in_every_part(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left as it is, any one part moves the logits."""
    as_it_is = getattr(Folding, part)
    if part in ("attention_out", "mlp_down"):
        monkeypatch.setattr(RotatedFolding, part, lambda self, weight: self._outputs(weight.float().clone()))
    else:
        monkeypatch.setattr(RotatedFolding, part, as_it_is)
    assert moved(model_with_gains("qwen2", False), rotated=True) > 1e-2


def test_an_embedding_of_more_rows_than_a_strip_is_rotated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "_STRIP_ROWS", 50)
    assert moved(model_with_gains("qwen2", True), rotated=True) < 2e-4


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_int8_is_rotated_unless_told_otherwise_and_nothing_else_is(family: str, tied: bool) -> None:
    def loaded(weight_dtype: torch.dtype, rotated: bool | None = None) -> Decoder:
        model = model_with_gains(family, tied)
        config = config_from_hf(model.config.to_dict())
        kernels = choose_kernels(KernelContext("cpu", WIDE, weight_dtype, WIDE, config.head_dim))
        checkpoint = tiny.StateDictCheckpoint(tiny.hf_tensors(model))
        return Decoder.load(config, kernels, checkpoint, WIDE, weight_dtype, rotated)

    assert [loaded(dtype).folding for dtype in (torch.int8, torch.bfloat16, WIDE)] == ["rotated", "", ""]
    assert torch.equal(loaded(torch.int8).norm, torch.ones(loaded(WIDE).config.hidden_size))
    assert loaded(torch.int8, rotated=False).folding == ""
    assert loaded(torch.int8).num_bytes == loaded(torch.int8, rotated=False).num_bytes


def with_outliers(model: Any) -> Any:
    """A few channels stand out by 50, where the residual stream begins and among each MLP's inner ones, whose weights
    make up for it."""
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[[5, 40]] *= 50
            for matrix in (*(getattr(layer.self_attn, f"{part}_proj") for part in "qkv"), layer.mlp.gate_proj):
                matrix.weight[:, [5, 40]] /= 50
            layer.mlp.up_proj.weight[:, [5, 40]] /= 50
            layer.mlp.up_proj.weight[[3, 70]] *= 50
            layer.mlp.down_proj.weight[:, [3, 70]] /= 50
    return model


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_rotations_lower_what_int8_costs_a_model_with_outliers(family: str) -> None:
    """Where activations have more than 8 bits outliers cost little, and a rotation need only do no harm."""
    model = with_outliers(tiny.random_hf_model(family))
    plain = moved(model, rotated=False, weight_dtype=torch.int8)
    share = 0.7 if native.isa() in ("amx", "avx512_bf16", "avx512") else 1.5
    assert moved(model, rotated=True, weight_dtype=torch.int8) < share * plain
