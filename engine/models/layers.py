"""Layers that the model families share, on the chosen kernels. Shapes and maths as in transformers' modelling files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.engine.config import ModelConfig
from antiphon.engine.models.weights import WeightReader
from antiphon.engine.pages import KVCache
from antiphon.kernels.attention_plan import AttentionPlan
from antiphon.kernels.ops import KernelSet, PackedGatedMlp, PackedLinear


@dataclass(frozen=True)
class StepInputs:
    """What every layer of one step needs, made once: rotary `cos, sin [tokens, head_dim / 2]`, `slots [tokens]`."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    plan: AttentionPlan
    cache: KVCache


class RotaryTable:
    """cos and sin of every position, made in fp32 as transformers does, then cast."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        self._inverse_frequencies = 1.0 / (config.rope_theta**exponents)
        self._dtype = dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions [tokens]`, `[tokens, head_dim / 2]` each."""
        angles = positions.float()[:, None] * self._inverse_frequencies[None, :]
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with fused q, k, v projection; with q and k norms where the family has them."""

    config: ModelConfig
    kernels: KernelSet
    qkv: PackedLinear
    out: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None

    @staticmethod
    def load(config: ModelConfig, kernels: KernelSet, weights: WeightReader, name: str) -> Attention:
        """Takes the tensors under `name` (`model.layers.N.self_attn`)."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        weight = torch.cat([weights.take(f"{name}.{part}.weight", size, config.hidden_size) for part, size in sizes])
        bias = None
        if config.attention_bias:
            bias = torch.cat([weights.take(f"{name}.{part}.bias", size) for part, size in sizes])
        out_bias = None
        if config.model_type == "qwen3" and config.attention_bias:
            out_bias = weights.take(f"{name}.o_proj.bias", config.hidden_size)
        return Attention(
            config,
            kernels,
            kernels.linear(weight, bias),
            kernels.linear(weights.take(f"{name}.o_proj.weight", config.hidden_size, q_size), out_bias),
            weights.take(f"{name}.q_norm.weight", config.head_dim) if config.qk_norm else None,
            weights.take(f"{name}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        )

    def __call__(self, x: Tensor, step: StepInputs, layer: int, residual: Tensor) -> Tensor:
        """`x [tokens, hidden]` → `residual` plus its attention, `[tokens, hidden]`; stores this layer's keys and
        values."""
        config, kernels = self.config, self.kernels
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, k, v = (
            part.view(-1, heads, config.head_dim)
            for part, heads in zip(
                torch.split(self.qkv(x), [q_size, kv_size, kv_size], dim=-1),
                (config.num_heads, config.num_kv_heads, config.num_kv_heads),
                strict=True,
            )
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = kernels.rms_norm(q, self.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, self.k_norm, config.rms_norm_eps)
        cache = step.cache.layer(layer)
        q = kernels.rotary_and_store(q, k, v, step.cos, step.sin, cache, step.slots)
        return self.out(kernels.paged_attention(q, cache, step.plan), residual)


@dataclass(frozen=True)
class ComposedMlp:
    """SiLU-gated MLP of two products: gate and up in one, then down."""

    kernels: KernelSet
    gate_up: PackedLinear
    down: PackedLinear

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.num_bytes + self.down.num_bytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`x [tokens, hidden]` → `residual` plus its MLP, `[tokens, hidden]`."""
        return self.down(self.kernels.silu_and_mul(self.gate_up(x)), residual)


def load_mlp(config: ModelConfig, kernels: KernelSet, weights: WeightReader, name: str) -> PackedGatedMlp:
    """The gated MLP of the tensors under `name` (`model.layers.N.mlp`), fused where there is a kernel for it."""
    hidden, size = config.hidden_size, config.intermediate_size
    gate, up = (weights.take(f"{name}.{part}.weight", size, hidden) for part in ("gate_proj", "up_proj"))
    down = weights.take(f"{name}.down_proj.weight", hidden, size)
    if kernels.gated_mlp is not None:
        return kernels.gated_mlp(gate, up, down)
    return ComposedMlp(kernels, kernels.linear(torch.cat([gate, up]), None), kernels.linear(down, None))


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual."""

    kernels: KernelSet
    eps: float
    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: PackedGatedMlp

    @staticmethod
    def load(config: ModelConfig, kernels: KernelSet, weights: WeightReader, layer: int) -> DecoderLayer:
        """Takes the tensors of `model.layers.{layer}`."""
        name = f"model.layers.{layer}"
        return DecoderLayer(
            kernels,
            config.rms_norm_eps,
            weights.take(f"{name}.input_layernorm.weight", config.hidden_size),
            Attention.load(config, kernels, weights, f"{name}.self_attn"),
            weights.take(f"{name}.post_attention_layernorm.weight", config.hidden_size),
            load_mlp(config, kernels, weights, f"{name}.mlp"),
        )

    def __call__(self, x: Tensor, step: StepInputs, layer: int) -> Tensor:
        """`x [tokens, hidden]` → `[tokens, hidden]`."""
        x = self.attention(self.kernels.rms_norm(x, self.input_norm, self.eps), step, layer, residual=x)
        return self.mlp(self.kernels.rms_norm(x, self.post_norm, self.eps), residual=x)
