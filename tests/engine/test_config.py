"""A config.json is read exactly, or refused: nothing that this engine cannot compute is let through."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.engine.config import ModelConfig, config_from_hf
from antiphon.engine.errors import ModelError

QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}


def test_a_qwen2_config_is_read_field_by_field() -> None:
    assert config_from_hf(QWEN2) == ModelConfig(
        model_type="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151_936,
        max_position=32_768,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        attention_bias=True,
        qk_norm=False,
    )


def test_counts_that_memory_is_planned_by() -> None:
    config = config_from_hf(QWEN2)
    assert config.num_groups == 7
    assert config.kv_bytes_per_token(2) == 2 * 24 * 2 * 64 * 2
    assert config.num_head_parameters == 896 * 151_936
    assert config.num_linear_parameters == 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864)


def test_qwen3_has_norms_on_q_and_k_and_its_own_head_size() -> None:
    config = config_from_hf({**QWEN2, "model_type": "qwen3"})
    assert (config.head_dim, config.qk_norm, config.attention_bias) == (128, True, False)
    assert config_from_hf({**QWEN2, "model_type": "qwen3", "attention_bias": True}).attention_bias
    assert config_from_hf({**QWEN2, "model_type": "qwen3", "head_dim": 64}).head_dim == 64


@pytest.mark.parametrize("null", ["num_key_value_heads", "head_dim", "rope_parameters", "rope_scaling"])
def test_null_fields_take_their_defaults(null: str) -> None:
    config = config_from_hf({**QWEN2, null: None})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (
        14 if null == "num_key_value_heads" else 2,
        64,
        1_000_000.0,
    )


def test_theta_is_found_in_rope_parameters_too() -> None:
    nested = {"rope_theta": 5e6, "rope_type": "default"}
    assert config_from_hf({**QWEN2, "rope_theta": None, "rope_parameters": nested}).rope_theta == 5e6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "llama"}, "unknown architecture 'llama': known are qwen2, qwen3"),
        ({"model_type": None}, "unknown architecture None"),
        ({"model_type": ["qwen2"]}, "unknown architecture"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rotary scaling 'yarn' in rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn' in rope_parameters"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_key_value_heads": 4}, "14 query heads cannot be grouped over 4 KV heads"),
        ({"head_dim": 63}, "even head size"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf({**QWEN2, **changed})


@pytest.mark.parametrize("wrong", ["many", None, [1], {}, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_attention_heads"])
def test_a_field_of_another_type_is_a_model_error(field: str, wrong: Any) -> None:
    with pytest.raises(ModelError):
        config_from_hf({**QWEN2, field: wrong})


@pytest.mark.parametrize(
    "changed", [{"num_attention_heads": 0}, {"rope_scaling": [1]}, {"rope_parameters": "default"}, {"layer_types": 3}]
)
def test_a_damaged_config_is_a_model_error(changed: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        config_from_hf({**QWEN2, **changed})


@pytest.mark.parametrize("missing", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_a_model_error_that_names_it(missing: str) -> None:
    with pytest.raises(ModelError, match=missing):
        config_from_hf({name: value for name, value in QWEN2.items() if name != missing})
