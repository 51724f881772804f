"""GGUF's own words for a model, in Hugging Face's: tensor names and the configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from antiphon.engine.config import ModelConfig, config_from_hf
from antiphon.engine.errors import ModelError

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
_ARCHITECTURES = ("qwen2", "qwen3")


def hf_tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; raises `ModelError` for one that this engine would have to ignore.

    Qwen's query and key rows stand in the same order in both formats, so that names are all that differs.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if not match or match[2] not in _IN_LAYER:
        raise ModelError(f"GGUF tensor {name!r} is not known for {' or '.join(_ARCHITECTURES)}")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def config_from_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Read GGUF fields and tensor shapes; raises `ModelError` for what is missing, malformed or not computed exactly.

    The head is tied exactly when there is no `output.weight`; the vocabulary is what the embedding has rows.
    """
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"unknown GGUF architecture {architecture!r}: known are {', '.join(_ARCHITECTURES)}")
    reader = _Fields(fields, architecture)
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise ModelError(f"GGUF tensor token_embd.weight has shape {embedding}, it must be there with two dimensions")
    heads, hidden = reader.count("attention.head_count"), reader.count("embedding_length")
    head_dim = reader.count("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if reader.count(name, head_dim) != head_dim:
            raise ModelError(f"GGUF field {architecture}.{name} differs from the head size {head_dim}: not supported")
    return config_from_hf(
        {
            "model_type": architecture,
            "hidden_size": hidden,
            "intermediate_size": reader.count("feed_forward_length"),
            "num_hidden_layers": reader.count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": reader.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": embedding[0],
            "max_position_embeddings": reader.count("context_length"),
            "rms_norm_eps": reader.positive("attention.layer_norm_rms_epsilon"),
            "rope_theta": reader.positive("rope.freq_base", 10_000.0),
            "rope_scaling": reader.rope_scaling(),
            "use_sliding_window": bool(reader.count("attention.sliding_window", 0)),
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
        }
    )


class _Fields:
    """Typed reads of one architecture's fields."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._fields = fields
        self._architecture = architecture

    def count(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is not int or value < (0 if default == 0 else 1):
            raise ModelError(f"GGUF field {self._architecture}.{name} is {value!r}, a positive integer is needed")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) is not float or not math.isfinite(value) or value <= 0:
            raise ModelError(f"GGUF field {self._architecture}.{name} is {value!r}, a positive number is needed")
        return value

    def rope_scaling(self) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type", "none")
        linear = self._get("rope.scale_linear", 1.0)
        if linear != 1.0:
            return {"rope_type": "linear", "factor": linear}
        return None if kind == "none" else {"rope_type": kind}

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise ModelError(f"GGUF field {self._architecture}.{name} is missing")
        return value
