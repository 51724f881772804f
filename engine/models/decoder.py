"""`Decoder`: embedding, layers, last norm and head of a dense decoder-only model (Qwen2, Qwen3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.engine.checkpoint import Checkpoint
from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import ModelError
from antiphon.engine.models.layers import DecoderLayer, RotaryTable, StepInputs
from antiphon.engine.models.weights import WeightReader
from antiphon.kernels.ops import KernelSet, PackedLinear

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Decoder:
    """A dense model's weights in their kernels' form. Holds no state of any row."""

    config: ModelConfig
    kernels: KernelSet
    dtype: torch.dtype
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: PackedLinear
    rotary: RotaryTable

    @staticmethod
    def load(
        config: ModelConfig,
        kernels: KernelSet,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
    ) -> Decoder:
        """Reads and packs tensor by tensor; raises `ModelError` on a missing, misshapen or unused tensor."""
        weights = WeightReader(checkpoint, dtype, weight_dtype or dtype)
        embedding = weights.take(_EMBEDDING, config.vocab_size, config.hidden_size)
        head = kernels.linear(_head_weight(config, weights, embedding), None)
        layers = tuple(DecoderLayer.load(config, kernels, weights, layer) for layer in range(config.num_layers))
        norm = weights.take("model.norm.weight", config.hidden_size)
        weights.finish()
        return Decoder(config, kernels, dtype, embedding, layers, norm, head, RotaryTable(config, dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as held."""
        linears = [self.head]
        norms = [self.norm]
        for layer in self.layers:
            linears += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
            norms += [layer.input_norm, layer.post_norm]
        return self.embedding.nbytes + sum(part.num_bytes for part in linears) + sum(norm.nbytes for norm in norms)

    def forward(self, token_ids: Tensor, step: StepInputs) -> Tensor:
        """`token_ids [tokens]` → last hidden states after the norm, `[tokens, hidden]`; fills the step's pages."""
        x = self.embedding[token_ids].to(self.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, step, index)
        return self.kernels.rms_norm(x, self.norm, self.config.rms_norm_eps)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that a model's weights will take, known before anything is loaded (norms, biases and the head's rows, which
    kernels fill up to panels of 16, are rounded up)."""
    parameters = config.num_linear_parameters + 2 * config.num_head_parameters + 16 * config.hidden_size
    return parameters * dtype.itemsize + config.num_layers * 8 * config.hidden_size * dtype.itemsize


def _head_weight(config: ModelConfig, weights: WeightReader, embedding: Tensor) -> Tensor:
    """The head's weight: its own where untied, the embedding where tied (a copy beside it must then be equal)."""
    if not config.tie_word_embeddings:
        return weights.take(_HEAD, config.vocab_size, config.hidden_size)
    if weights.has(_HEAD) and not torch.equal(weights.take(_HEAD, config.vocab_size, config.hidden_size), embedding):
        raise ModelError(f"weights: the config ties the head to the embedding, but {_HEAD} differs from it")
    return embedding
