"""What streaming promises: whole characters only, and nothing lost."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from antiphon.engine.errors import InputError
from antiphon.engine.model_source import resolve_model
from antiphon.engine.stream_decoder import StreamDecoder
from antiphon.engine.tokenizer import Tokenizer

TEXTS = (
    "plain",
    "日本語の文",
    "👩‍🚀🏳️‍🌈 and 🫠",
    "é ñ ü",
    "a\ufffdb",
    "\U0001f9d1\U0001f3fd",
    "\n\t  \r\n",
    "<|im_end|>",
)


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    """One token for each byte, so that every character beyond ASCII is split."""
    arguments: dict[str, Any] = {"vocab": {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, "merges": []}
    hf = Qwen2Tokenizer(**arguments, unk_token=None, eos_token="<|im_end|>", pad_token="<|im_end|>")  # type: ignore[arg-type]
    hf.add_tokens([AddedToken("<|fim▁hole|>", special=True)])
    return Tokenizer(hf, {256})


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole_and_nothing_is_lost(bytewise: Tokenizer, text: str) -> None:
    ids = bytewise.encode(text)
    assert len(ids) == len(text.encode())
    found = pieces(bytewise, ids)
    assert "".join(found) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)
    assert found[-1] == ""


def test_the_check_can_fail_token_by_token_decoding_breaks_characters(bytewise: Tokenizer) -> None:
    assert "\ufffd" in "".join(bytewise.decode([token_id]) for token_id in bytewise.encode("日本"))


def test_an_unfinished_character_is_flushed_once(bytewise: Tokenizer) -> None:
    decoder = StreamDecoder(bytewise)
    for token_id in bytewise.encode("日")[:2]:
        assert decoder.push(token_id) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(bytewise.encode("a")[0]) == "a"


def test_a_special_token_ends_an_unfinished_character(bytewise: Tokenizer) -> None:
    ids = [*bytewise.encode("日")[:2], *bytewise.encode_control("<|im_end|><|fim▁hole|>")]
    assert len(ids) == 4
    assert "".join(pieces(bytewise, ids)) == bytewise.decode(ids) == "\ufffd<|im_end|><|fim▁hole|>"


def test_any_bytes_stream_as_they_decode_whole(bytewise: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.choice((rng.randrange(256), rng.randrange(180, 256), 257)) for _ in range(rng.randrange(12))]
        assert "".join(pieces(bytewise, ids)) == bytewise.decode(ids)


def test_a_token_outside_the_vocabulary_is_an_input_error(bytewise: Tokenizer) -> None:
    with pytest.raises(InputError, match="token id 999"):
        StreamDecoder(bytewise).push(999)


@pytest.mark.embedded
def test_emoji_and_cjk_stream_whole_with_the_embedded_tokenizer() -> None:
    tokenizer = resolve_model("qwen2.5-coder-0.5b").tokenizer()
    num_split = 0
    for text in (*TEXTS, "𠮷野家で🍜を食べる", "मानक हिन्दी", "\U0001fae8\U0001fabf\U0001f6dd"):
        ids = tokenizer.encode(text)
        found = pieces(tokenizer, ids)
        assert "".join(found) == unicodedata.normalize("NFC", text)
        assert "\ufffd" in text or "\ufffd" not in "".join(found)
        num_split += sum("\ufffd" in tokenizer.decode([token_id]) for token_id in ids)
    assert num_split > 10
