"""`ModelConfig`: all that determines a model's shapes and maths, read from a config.json or from GGUF fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.engine.errors import ModelError


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of one decoder-only model. Sizes are counts of elements, lengths are tokens."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"model config: {name} is {getattr(self, name)}, it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: {self.num_heads} query heads cannot be grouped over {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"model config: rotary embedding needs an even head size, this one is {self.head_dim}")

    @property
    def num_groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of keys and values that one token takes over all layers; `scale_bytes` go with each vector."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * element_bytes + scale_bytes)

    @property
    def num_linear_parameters(self) -> int:
        """Parameters of all layers' matrix products, without embedding and head."""
        heads = self.num_heads * self.head_dim
        kv_heads = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * heads + 2 * kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_linear_outputs(self) -> int:
        """Outputs (rows of the weights) of all layers' matrix products, without the head."""
        attention = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.hidden_size
        return self.num_layers * (attention + 2 * self.intermediate_size + self.hidden_size)

    @property
    def num_head_parameters(self) -> int:
        """Parameters of the language-model head."""
        return self.hidden_size * self.vocab_size


_FAMILIES = {"qwen2": (True, False), "qwen3": (None, True)}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.json mapping; raises `ModelError` for what this engine cannot compute exactly."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ModelError(f"unknown architecture {model_type!r}: known are {', '.join(sorted(_FAMILIES))}")
    fixed_bias, qk_norm = _FAMILIES[model_type]
    try:
        _refuse_unsupported(raw)
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        return ModelConfig(
            model_type=model_type,
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)),
            vocab_size=int(raw["vocab_size"]),
            max_position=int(raw.get("max_position_embeddings", 32_768)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)) if fixed_bias is None else fixed_bias,
            qk_norm=qk_norm,
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"model config: cannot read {error!r}") from error


def _rope_theta(raw: Mapping[str, Any]) -> float:
    parameters = raw.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(key) or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ModelError(f"model config: rotary scaling {kind!r} in {key} is not supported yet")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ModelError("model config: it asks for sliding windows, they are not supported yet")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"model config: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
