"""Layers that the model families share, on the chosen kernels. Shapes and maths as in transformers' modelling files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.engine.config import ModelConfig
from antiphon.engine.models.blocks import pack_gated_mlp, pack_normed_linear
from antiphon.engine.models.folding import Folding
from antiphon.engine.models.weights import WeightReader
from antiphon.engine.pages import KVCache
from antiphon.kernels.attention_plan import AttentionPlan
from antiphon.kernels.ops import KernelSet, Norm, PackedBlock, PackedLinear, Planes

_OUT_PLANES = Planes(activations=True)  # where one product more costs least (decision 7)


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
    """Grouped-query attention behind its norm, with fused q, k, v projection; with q and k norms where the family has
    them. Added to its input."""

    config: ModelConfig
    kernels: KernelSet
    qkv: PackedBlock
    out: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None

    @staticmethod
    def load(
        config: ModelConfig, kernels: KernelSet, weights: WeightReader, folding: Folding, name: str, norm: Norm
    ) -> Attention:
        """Takes the tensors under `name` (`model.layers.N.self_attn`); `norm` is as the checkpoint has it."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        q, k, v = (weights.take(f"{name}.{part}.weight", size, config.hidden_size) for part, size in sizes)
        weight = folding.behind_norm(torch.cat([q, k, folding.values(v)]), norm.weight)
        bias = None
        if config.attention_bias:
            q, k, v = (weights.take(f"{name}.{part}.bias", size) for part, size in sizes)
            bias = torch.cat([q, k, folding.values(v)])
        out = folding.attention_out(weights.take(f"{name}.o_proj.weight", config.hidden_size, q_size))
        out_bias = None
        if config.model_type == "qwen3" and config.attention_bias:
            out_bias = folding.added(weights.take(f"{name}.o_proj.bias", config.hidden_size))
        return Attention(
            config,
            kernels,
            pack_normed_linear(kernels, Norm(folding.gain(norm.weight), norm.eps), weight, bias),
            kernels.linear(out, out_bias, _OUT_PLANES),
            weights.take(f"{name}.q_norm.weight", config.head_dim) if config.qk_norm else None,
            weights.take(f"{name}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        )

    def __call__(self, x: Tensor, step: StepInputs, layer: int) -> Tensor:
        """`x [tokens, hidden]` → x plus its attention, `[tokens, hidden]`; stores this layer's keys and values."""
        config, kernels = self.config, self.kernels
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = kernels.rms_norm(q, self.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, self.k_norm, config.rms_norm_eps)
        cache = step.cache.layer(layer)
        q = kernels.rotary_and_store(q, k, v, step.cos, step.sin, cache, step.slots)
        return self.out(kernels.paged_attention(q, cache, step.plan), x)


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and gated MLP, each behind a norm and added to its input."""

    attention: Attention
    mlp: PackedBlock

    @staticmethod
    def load(
        config: ModelConfig, kernels: KernelSet, weights: WeightReader, folding: Folding, layer: int
    ) -> DecoderLayer:
        """Takes the tensors of `model.layers.{layer}`."""
        name, hidden, size = f"model.layers.{layer}", config.hidden_size, config.intermediate_size

        def norm(of: str) -> Norm:
            return Norm(weights.take(f"{name}.{of}_layernorm.weight", hidden), config.rms_norm_eps)

        attention = Attention.load(config, kernels, weights, folding, f"{name}.self_attn", norm("input"))
        before = norm("post_attention")
        gate, up = (
            folding.behind_norm(weights.take(f"{name}.mlp.{part}_proj.weight", size, hidden), before.weight)
            for part in ("gate", "up")
        )
        down = folding.mlp_down(weights.take(f"{name}.mlp.down_proj.weight", hidden, size))
        plain = Norm(folding.gain(before.weight), before.eps)
        return DecoderLayer(attention, pack_gated_mlp(kernels, plain, gate, up, down, folding.mlp_block))

    def __call__(self, x: Tensor, step: StepInputs, layer: int) -> Tensor:
        """`x [tokens, hidden]` → `[tokens, hidden]`."""
        return self.mlp(self.attention(x, step, layer))
