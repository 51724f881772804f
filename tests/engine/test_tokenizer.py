"""What the tokenizer promises: plain text stays plain, templates run boxed in, end tokens come from everywhere."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from antiphon.engine.errors import InputError, ModelError
from antiphon.engine.tokenizer import Tokenizer, tokenizer_from_folder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def small_hf(template: str | None = TEMPLATE) -> Qwen2Tokenizer:
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, "he", "ll", "hell"])}
    arguments: dict[str, Any] = {"vocab": vocab, "merges": [("h", "e"), ("l", "l"), ("he", "ll")], "unk_token": None}
    hf = Qwen2Tokenizer(**arguments, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    hf.add_tokens([AddedToken(text, special=True) for text in SPECIALS])
    hf.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    hf.chat_template = template
    return hf


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(small_hf(), {1, 2})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_hf().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("marker", [*SPECIALS, "<tool_call>"])
def test_marker_strings_are_text_when_plain_and_tokens_when_control(tokenizer: Tokenizer, marker: str) -> None:
    marker_id = tokenizer.token_id(marker)
    text = f"hello{marker} hello"
    assert marker_id is not None
    assert marker_id in tokenizer.encode_control(text)
    assert marker_id not in tokenizer.encode(text)
    assert max(tokenizer.encode(text)) < 259
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode_control(text)) == text


def test_only_added_tokens_have_a_token_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("hell") is None
    assert tokenizer.token_id("<|nothing|>") is None
    assert tokenizer.vocab_size == 263


@pytest.mark.parametrize("text", ["", "hello", " hello\n\n  x", "日本 👩‍🚀 é", "\ufffd", "a\x00b", "<|im_end|"])
def test_offsets_cut_the_text_where_the_tokens_are(tokenizer: Tokenizer, text: str) -> None:
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(offsets)
    assert {i for start, end in offsets for i in range(start, end)} == set(range(len(text)))
    for token_id, (start, end) in zip(ids, offsets, strict=True):
        if tokenizer.decode([token_id]).isascii():
            assert tokenizer.decode([token_id]) == text[start:end]


def test_a_lone_surrogate_is_an_input_error(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_control, tokenizer.encode_with_offsets):
        with pytest.raises(InputError, match="character 1 is a lone surrogate"):
            encode("a\ud800")


def test_a_token_outside_the_vocabulary_is_an_input_error(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(258) == "hell"
    for token_id in (-1, 263, 10**9):
        with pytest.raises(InputError, match="not in the vocabulary of 263"):
            tokenizer.token_text(token_id)


def test_chat_is_rendered_with_flags_and_prompt(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.render_chat(messages, enable_thinking=False).endswith("<think></think>")


@pytest.mark.parametrize("arguments", ['{"query": "where"}', {"query": "where"}])
def test_string_arguments_of_tool_calls_reach_the_template_as_mappings(tokenizer: Tokenizer, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "query_agents", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "[query=where]" in tokenizer.render_chat([message])
    assert call["function"]["arguments"] is arguments  # type: ignore[index]


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", '"text"', "[" * 100_000])
def test_arguments_that_are_no_object_are_an_input_error(tokenizer: Tokenizer, arguments: str) -> None:
    call = {"type": "function", "function": {"name": "query_agents", "arguments": arguments}}
    with pytest.raises(InputError, match="arguments"):
        tokenizer.render_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("flag", ["chat_template", "tokenize", "return_dict", "anything"])
def test_no_flag_reaches_beyond_the_template(tokenizer: Tokenizer, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        tokenizer.render_chat([], **{flag: "{{ 1 }}"})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception('no system turn here') }}",
        "{% broken",
    ],
)
def test_hostile_and_broken_templates_are_an_input_error(template: str) -> None:
    with pytest.raises(InputError, match="template"):
        Tokenizer(small_hf(template), {1}).render_chat([{"role": "user", "content": "hi"}])


def test_missing_and_vast_templates_are_a_model_error() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(small_hf(None), {1}).render_chat([])
    with pytest.raises(ModelError, match="characters"):
        Tokenizer(small_hf("x" * 300_000), {1}).render_chat([])


def test_other_kinds_of_tokenizers_are_refused() -> None:
    hf = small_hf()
    plain = PreTrainedTokenizerFast(tokenizer_object=hf.backend_tokenizer)
    plain.backend_tokenizer.decoder = None
    with pytest.raises(ModelError, match="byte-level"):
        Tokenizer(plain, {1})


def test_end_tokens_are_the_union_of_all_sources(folder: Path) -> None:
    own_id = small_hf().convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer_from_folder(folder).eos_ids == {own_id}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert tokenizer_from_folder(folder).eos_ids == {own_id, 7, 8, 9}


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, true]}'])
def test_malformed_generation_config_is_a_model_error(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        tokenizer_from_folder(folder)


def test_a_folder_gives_the_tokenizer_that_was_saved(folder: Path, tokenizer: Tokenizer) -> None:
    loaded = tokenizer_from_folder(folder)
    text = "hello <|im_end|> <tool_call>\n日本"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.encode_control(text) == tokenizer.encode_control(text)
    assert loaded.render_chat([{"role": "user", "content": "hi"}]) == tokenizer.render_chat(
        [{"role": "user", "content": "hi"}]
    )


def test_a_missing_or_damaged_tokenizer_is_a_model_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        tokenizer_from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer: tokenizer\.json or vocab\.json"):
        tokenizer_from_folder(folder)


def test_code_in_a_model_folder_never_runs(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for auto_map in ({"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, {"AutoTokenizer": [None, "evil.Evil"]}):
        path.write_text(json.dumps({**config, "auto_map": auto_map}))
        (folder / "config.json").write_text(
            json.dumps({"model_type": "qwen2", "auto_map": {"AutoConfig": "evil.Evil"}})
        )
        assert tokenizer_from_folder(folder).decode([258]) == "hell"
    path.write_text(json.dumps({**config, "tokenizer_class": "Evil", "auto_map": auto_map}))
    with contextlib.suppress(ModelError):
        tokenizer_from_folder(folder)
    assert not ran.exists()
