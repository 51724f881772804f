"""The tokenizer built from GGUF fields: the same as transformers makes of them, and a `ModelError` for bad fields."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from antiphon.engine.errors import ModelError
from antiphon.engine.gguf_checkpoint import GgufHeader
from antiphon.engine.gguf_tokenizer import tokenizer_from_gguf
from antiphon.engine.model_source import resolve_model
from antiphon.engine.tokenizer import Tokenizer

ALPHABET = tuple(sorted(ByteLevel.alphabet()))
FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": (*ALPHABET, "he", "<|endoftext|>", "<|im_end|>", "<tool_call>", "[PAD0]", "[PAD1]"),
        "tokenizer.ggml.token_type": (*[1] * 257, 3, 3, 4, 5, 5),
        "tokenizer.ggml.merges": ("h e",),
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.padding_token_id": 257,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
)


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return resolve_model("qwen2.5-coder-0.5b").tokenizer()


def header(**changes: Any) -> GgufHeader:
    fields = {**FIELDS, **{f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}}
    return GgufHeader(Path("m.gguf"), {name: value for name, value in fields.items() if value is not None}, {}, 0)


def test_padding_tokens_are_left_out_and_end_tokens_joined() -> None:
    tokenizer = tokenizer_from_gguf(header())
    assert tokenizer.vocab_size == 260
    assert tokenizer.eos_ids == {257, 258}
    assert tokenizer_from_gguf(header(ggml__eot_token_id=3)).eos_ids == {3, 257, 258}
    assert (tokenizer.hf.eos_token, tokenizer.hf.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_control_and_user_tokens_are_recognised_in_control_text_only() -> None:
    tokenizer = tokenizer_from_gguf(header())
    assert tokenizer.encode_control("he<|im_end|><tool_call>") == [256, 258, 259]
    assert max(tokenizer.encode("he<|im_end|><tool_call>")) == 256
    assert tokenizer.encode("[PAD0]") == [ALPHABET.index(char) for char in "[PAD0]"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__model": "llama"}, "'llama'"),
        ({"ggml__pre": "gpt-4o"}, "'gpt-4o'"),
        ({"ggml__tokens": None}, "tokens is missing"),
        ({"ggml__tokens": "abc"}, "not an array"),
        ({"ggml__tokens": (1, 2)}, "not an array of str"),
        ({"ggml__token_type": (1,)}, "have 1 types"),
        ({"ggml__tokens": ("a",) * 262}, "1 of them distinct"),
        ({"ggml__merges": ("h e x",)}, "'h e x' is not two tokens"),
        ({"ggml__merges": ("he",)}, "not two tokens"),
        ({"ggml__merges": ("h x",)}, "do not fit"),
        ({"ggml__eos_token_id": 260}, "eos_token_id is 260"),
        ({"ggml__eos_token_id": -1}, "eos_token_id is -1"),
        ({"ggml__padding_token_id": "x"}, "padding_token_id is 'x'"),
        ({"chat_template": 5}, "template is not a string"),
    ],
)
def test_contradicting_fields_are_a_model_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(header(**changes))


@pytest.mark.embedded
def test_embedded_tokenizer_equals_transformers_own_conversion(embedded: Tokenizer) -> None:
    source = resolve_model("qwen2.5-coder-0.5b")
    ours = embedded
    theirs = PreTrainedTokenizerFast.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
    texts = [
        "The quick brown fox, it's don't WE'LL 12345 3.14\n\n\n  indented\t\ttabs\r\n",
        "日本語 한국어 العربية हिन्दी ไทย 👩‍🚀🏳️‍🌈🫠 𠮷 é ñ \u00a0\u3000\ufeff\x00\x7f",
        "a<|im_end|>b <|im_start|>user\n<tool_call>{}</tool_call><|fim_prefix|>",
        Path(__file__).read_text(),
        "x" * 3000 + " " * 3000 + "\n" * 300 + "!?" * 500,
    ]
    for text in texts:
        # Transformers' conversion drops the NFC normalizer that Qwen's own tokenizer.json has.
        text = unicodedata.normalize("NFC", text)
        ids = ours.encode_control(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert (ours.vocab_size, len(theirs)) == (151_665, 151_936)
    assert ours.hf.chat_template == theirs.chat_template
    assert ours.eos_ids == {151_643, 151_645}


@pytest.mark.embedded
def test_text_is_normalised_as_in_qwens_own_tokenizer(embedded: Tokenizer) -> None:
    assert embedded.encode("e\u0301") == embedded.encode("\u00e9") == [963]
