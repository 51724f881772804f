"""A tiny random model on disk, whole (weights, tokenizer, chat template), for tests that run everything for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

# As in tests/conftest.py: helper modules of this folder.
sys.path.insert(0, str(Path(__file__).parent))

_END = "<|im_end|>"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen2 of two layers whose tokens are bytes; it writes nonsense, at the speed of a test."""
    folder = tmp_path_factory.mktemp("tiny-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)  # type: ignore[no-untyped-call]
    fast.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", _END]})
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(2)
    config = Qwen2Config(
        # Padded above the tokenizer's length, as real models are.
        vocab_size=len(fast) + 5,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        eos_token_id=fast.convert_tokens_to_ids(_END),
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    return folder
