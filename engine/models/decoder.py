"""`Decoder`: embedding, layers, last norm and head of a dense decoder-only model (Qwen2, Qwen3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.engine.checkpoint import Checkpoint
from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import ModelError
from antiphon.engine.models.folding import Folding, RotatedFolding
from antiphon.engine.models.layers import DecoderLayer, RotaryTable, StepInputs
from antiphon.engine.models.weights import WeightReader
from antiphon.kernels.ops import KernelSet, PackedBlock, PackedLinear, Planes

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HEAD_PLANES = Planes(weight=True)  # what gave the most of what was tried (decision 7)


@dataclass(frozen=True)
class Decoder:
    """A dense model's weights in their kernels' form. Holds no state of any row. `folding` is what was folded into the
    weights, by name."""

    config: ModelConfig
    kernels: KernelSet
    dtype: torch.dtype
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: PackedLinear
    rotary: RotaryTable
    folding: str

    @staticmethod
    def load(
        config: ModelConfig,
        kernels: KernelSet,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        rotated: bool | None = None,
    ) -> Decoder:
        """Reads and packs tensor by tensor; raises `ModelError` on a missing, misshapen or unused tensor.

        `dtype` is that of the activations. With `weight_dtype` int8 the embedding, which is only looked up, is kept in
        bfloat16. `rotated` (None: with int8) folds rotations into the weights, see `folding.py`: the same logits to
        rounding, from other activations.
        """
        weight_dtype = weight_dtype or dtype
        rotated = weight_dtype == torch.int8 if rotated is None else rotated
        folding = RotatedFolding.of(config, kernels) if rotated else Folding()
        weights = WeightReader(checkpoint, dtype, weight_dtype)
        norm = weights.take("model.norm.weight", config.hidden_size)
        embedding = weights.take(_EMBEDDING, config.vocab_size, config.hidden_size)
        head = None
        if config.tie_word_embeddings:  # packed from all that the file has of it, before it is narrowed
            _check_tied_head(config, weights, embedding)
            head = kernels.linear(folding.behind_norm(embedding, norm), None, _HEAD_PLANES)
        embedding = folding.embedding(embedding, _embedding_dtype(weight_dtype))
        if head is None:
            own = (_HEAD, config.vocab_size, config.hidden_size)  # not named itself: it must go once it is packed
            head = kernels.linear(folding.behind_norm(weights.take(*own), norm), None, _HEAD_PLANES)
        layers = tuple(
            DecoderLayer.load(config, kernels, weights, folding, layer) for layer in range(config.num_layers)
        )
        weights.finish()
        norm, rotary = folding.gain(norm), RotaryTable(config, dtype)
        return Decoder(config, kernels, dtype, embedding, layers, norm, head, rotary, folding.name)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as held."""
        packed: list[PackedLinear | PackedBlock] = [self.head]
        norms = [self.norm]
        for layer in self.layers:
            attention = layer.attention
            packed += [attention.qkv, attention.out, layer.mlp]
            norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        return self.embedding.nbytes + sum(part.num_bytes for part in packed) + sum(norm.nbytes for norm in norms)

    def forward(self, token_ids: Tensor, step: StepInputs) -> Tensor:
        """`token_ids [tokens]` → last hidden states after the norm, `[tokens, hidden]`; fills the step's pages."""
        x = self.kernels.embedding(self.embedding, token_ids, self.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, step, index)
        return self.kernels.rms_norm(x, self.norm, self.config.rms_norm_eps)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that a model's weights will take with its matrices in `dtype`, known before anything is loaded (norms,
    biases and the head's rows, which kernels fill up to panels of 16, are rounded up; with int8 a form may keep a sum
    for each output beside its scale)."""
    embedding = config.num_head_parameters * _embedding_dtype(dtype).itemsize
    vectors = config.num_layers * 8 * config.hidden_size * 4
    sums = 4 * (config.num_linear_outputs + 2 * config.vocab_size + 64) if dtype == torch.int8 else 0
    return (
        matrix_bytes(config, dtype)
        + embedding
        + sums
        + 16 * _head_planes(dtype) * config.hidden_size * dtype.itemsize
        + vectors
    )


def matrix_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all that one pass multiplies with, head included: the matrices in `dtype`, with int8 a float32 scale
    for each of their outputs, and the head twice (`ops.PackLinear`'s planes)."""
    planes = _head_planes(dtype)
    scales = config.num_linear_outputs + planes * config.vocab_size if dtype == torch.int8 else 0
    return (config.num_linear_parameters + planes * config.num_head_parameters) * dtype.itemsize + 4 * scales


def _head_planes(weight_dtype: torch.dtype) -> int:
    """How many times the head's weight is kept."""
    return 2 if weight_dtype == torch.int8 and _HEAD_PLANES.weight else 1


def _embedding_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if weight_dtype == torch.int8 else weight_dtype


def _check_tied_head(config: ModelConfig, weights: WeightReader, embedding: Tensor) -> None:
    """Where a checkpoint has a copy of the embedding as its head, the two must be equal."""
    if weights.has(_HEAD) and not torch.equal(weights.take(_HEAD, config.vocab_size, config.hidden_size), embedding):
        raise ModelError(f"weights: the config ties the head to the embedding, but {_HEAD} differs from it")
