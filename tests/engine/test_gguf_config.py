"""GGUF fields and names in Hugging Face's words."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.engine.errors import ModelError
from antiphon.engine.gguf_config import config_from_gguf, hf_tensor_name

FIELDS: dict[str, Any] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 2,
    "qwen3.context_length": 4096,
    "qwen3.embedding_length": 64,
    "qwen3.feed_forward_length": 96,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 32,
    "qwen3.attention.value_length": 32,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3.rope.freq_base": 1_000_000.0,
}
SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


def test_qwen3_is_read_field_by_field() -> None:
    config = config_from_gguf(FIELDS, SHAPES)
    assert (config.model_type, config.hidden_size, config.intermediate_size, config.num_layers) == ("qwen3", 64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.max_position) == (100, 4096)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 1e6)
    assert config.qk_norm
    assert not config.attention_bias


def test_qwen2_has_biases_and_the_head_size_follows_from_the_heads() -> None:
    fields = {k.replace("qwen3", "qwen2"): v for k, v in FIELDS.items() if "_length" not in k or "attention" not in k}
    config = config_from_gguf({**fields, "general.architecture": "qwen2"}, SHAPES)
    assert (config.head_dim, config.attention_bias, config.qk_norm) == (16, True, False)


def test_head_is_tied_exactly_when_there_is_no_output_tensor() -> None:
    assert not config_from_gguf(FIELDS, SHAPES).tie_word_embeddings
    assert config_from_gguf(FIELDS, {"token_embd.weight": (100, 64)}).tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("general.architecture", "llama", "unknown GGUF architecture 'llama'"),
        ("general.architecture", 7, "unknown GGUF architecture 7"),
        ("qwen3.block_count", None, "block_count is missing"),
        ("qwen3.block_count", 0, "positive integer"),
        ("qwen3.attention.head_count", (4, 4), "positive integer"),
        ("qwen3.attention.value_length", 16, "differs from the head size"),
        ("qwen3.rope.dimension_count", 16, "differs from the head size"),
        ("qwen3.rope.freq_base", float("nan"), "positive number"),
        ("qwen3.attention.layer_norm_rms_epsilon", "1e-6", "positive number"),
        ("qwen3.rope.scaling.type", "yarn", "yarn"),
        ("qwen3.rope.scale_linear", 4.0, "linear"),
        ("qwen3.attention.sliding_window", 1024, "sliding"),
    ],
)
def test_fields_that_cannot_be_computed_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_gguf({**FIELDS, name: value}, SHAPES)


@pytest.mark.parametrize(
    ("gguf_name", "hf_name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("blk.10.attn_k.weight", "model.layers.10.self_attn.k_proj.weight"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
        ("blk.1.attn_k_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
        ("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_tensor_names(gguf_name: str, hf_name: str) -> None:
    assert hf_tensor_name(gguf_name) == hf_name


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.01.attn_q.weight", "blk.0.ssm_a", "blk.0.attn_qkv.weight", ""]
)
def test_unknown_tensors_are_refused_rather_than_ignored(name: str) -> None:
    with pytest.raises(ModelError, match="not known"):
        hf_tensor_name(name)
