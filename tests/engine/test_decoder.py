"""Weights reach their kernels in what they are to be kept in, or whole where the kernel quantises them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_models as tiny
import torch
from torch import Tensor

from antiphon.engine.config import config_from_hf
from antiphon.engine.models.blocks import ComposedLinear
from antiphon.engine.models.decoder import Decoder
from antiphon.kernels import reference
from antiphon.kernels.ops import ONE_PLANE, KernelContext, PackedLinear, Planes, Weight
from antiphon.kernels.registry import choose_kernels


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("file", "packed"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_for_int8_every_matrix_comes_without_loss_and_the_embedding_stays_in_bfloat16(
    file: torch.dtype, packed: torch.dtype, tied: bool
) -> None:
    model = tiny.random_hf_model("qwen3", tied=tied)
    tensors = {name: value.to(file) for name, value in tiny.hf_tensors(model).items()}
    decoder, seen = load(model, tensors, torch.int8)
    assert {weight.dtype for weight in seen} == {packed}
    assert len(seen) == 1 + 4 * 3
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(seen[0], head.to(packed)), "the head is packed from what the file has, not from bfloat16"
    assert torch.equal(decoder.embedding, tensors["model.embed_tokens.weight"].to(torch.bfloat16))
    block = decoder.layers[0].attention.qkv
    assert isinstance(block, ComposedLinear)
    vectors = [decoder.norm, block.norm.weight, decoder.layers[0].attention.q_norm]
    assert {vector.dtype for vector in vectors if vector is not None} == {torch.float32}


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_otherwise_matrices_and_embedding_come_in_the_weight_dtype(weight_dtype: torch.dtype) -> None:
    model = tiny.random_hf_model("qwen2", tied=True)
    decoder, seen = load(model, tiny.hf_tensors(model), weight_dtype)
    assert {weight.dtype for weight in seen} == {decoder.embedding.dtype} == {weight_dtype}
    assert decoder.norm.dtype == torch.float32


def load(
    model: tiny.PreTrainedModel, tensors: dict[str, Tensor], weight_dtype: torch.dtype
) -> tuple[Decoder, list[Tensor]]:
    """The decoder in float32 activations, and all weights that were packed, in order."""
    seen: list[Tensor] = []

    def linear(weight: Weight, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear:
        assert isinstance(weight, Tensor)
        seen.append(weight)
        return reference.linear(weight, bias)

    config = config_from_hf(model.config.to_dict())
    wide = torch.float32
    kernels = choose_kernels(KernelContext("cpu", wide, wide, wide, config.head_dim), only="reference")
    checkpoint = tiny.StateDictCheckpoint(tensors)
    return Decoder.load(config, replace(kernels, linear=linear), checkpoint, wide, weight_dtype, rotated=False), seen
