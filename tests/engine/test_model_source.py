"""Names become models, or an error that says what was looked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from antiphon.engine.errors import ModelError
from antiphon.engine.model_source import resolve_model

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.embed_tokens.weight": torch.zeros(300, 32)}, path / "model.safetensors")
    arguments: dict[str, Any] = {"vocab": {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, "merges": []}
    Qwen2Tokenizer(**arguments, unk_token="<|im_end|>", eos_token="<|im_end|>", pad_token="<|im_end|>").save_pretrained(
        path
    )
    return path


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, value in (
        ("block_count", 1),
        ("context_length", 128),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
    ):
        writer.add_uint32(f"qwen3.{name}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "he", "<|im_end|>"])
    writer.add_token_types([*[1] * 257, 3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(257)
    for name, shape in (
        ("token_embd.weight", (258, 32)),
        ("blk.0.attn_q_norm.weight", (16,)),
        ("blk.0.attn_k_norm.weight", (16,)),
    ):
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_folder_gives_configuration_weights_and_tokenizer(folder: Path) -> None:
    source = resolve_model(str(folder))
    assert (source.name, source.path, source.kind) == (str(folder), folder, "safetensors")
    assert (source.config.model_type, source.config.head_dim, source.config.tie_word_embeddings) == ("qwen3", 16, True)
    with source.open() as checkpoint:
        assert checkpoint.shape("model.embed_tokens.weight") == (300, 32)
    assert source.tokenizer().eos_ids == {256}


def test_qwen3_gguf_gives_the_same_three(gguf_file: Path) -> None:
    source = resolve_model(str(gguf_file))
    assert source.kind == "gguf"
    assert source.config.qk_norm
    assert source.config.tie_word_embeddings
    with source.open() as checkpoint:
        assert "model.layers.0.self_attn.q_norm.weight" in checkpoint.names()
        assert torch.equal(checkpoint.read("model.layers.0.self_attn.k_norm.weight"), torch.ones(16))
    assert source.tokenizer().encode_control("he<|im_end|>") == [256, 257]


def test_fingerprint_follows_the_weights_and_nothing_else(folder: Path) -> None:
    before = resolve_model(str(folder)).fingerprint
    assert len(bytes.fromhex(before)) == 32
    assert resolve_model(str(folder)).fingerprint == before
    (folder / "README.md").write_text("notes")
    assert resolve_model(str(folder)).fingerprint == before
    weights = folder / "model.safetensors"
    times = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = resolve_model(str(folder)).fingerprint
    os.utime(weights)
    touched = resolve_model(str(folder)).fingerprint
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-5}))
    assert len({before, changed, touched, resolve_model(str(folder)).fingerprint}) == 4


def test_what_is_nowhere_lists_what_there_is(tmp_path: Path) -> None:
    for name in ("qwen9", str(tmp_path / "missing"), "./missing", "missing/model.gguf", "", "a/b/c"):
        with pytest.raises(ModelError, match=r"qwen2\.5-coder-0\.5b, qwen2\.5-coder-1\.5b|no config\.json"):
            resolve_model(name)


def test_a_hub_repository_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"someone/model at revision v1 .*HF_HUB_OFFLINE"):
        resolve_model("someone/model", revision="v1")


def test_a_cached_hub_repository_is_found_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text(commit)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    source = resolve_model("someone/model", revision="v1")
    assert (source.name, source.path.name) == ("someone/model", commit)


def test_a_folder_without_a_configuration_is_refused(folder: Path, gguf_file: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json; give the \.gguf file"):
        resolve_model(str(gguf_file.parent))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json$"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"model_type": "mamba"}', "unknown architecture 'mamba'"),
        ('{"model_type": "qwen2"}', "cannot read"),
        (json.dumps({**CONFIG, "auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"}), "unknown architecture"),
    ],
)
def test_configurations_that_cannot_be_computed_are_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def test_a_foreign_architecture_in_gguf_is_refused(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"qwen3", b"llama"))
    with pytest.raises(ModelError, match=r"tiny\.gguf: unknown GGUF architecture 'llama'"):
        resolve_model(str(gguf_file))


def test_a_truncated_gguf_and_a_foreign_file_are_refused(gguf_file: Path, tmp_path: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-4000])
    with pytest.raises(ModelError, match="damaged GGUF file"):
        resolve_model(str(gguf_file))
    pickle_file = tmp_path / "model.bin"
    pickle_file.write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match=r"is not a \.gguf file"):
        resolve_model(str(pickle_file))


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 100}))
    with pytest.raises(ModelError, match="tokenizer has 257 tokens"):
        resolve_model(str(folder)).tokenizer()


@pytest.mark.embedded
@pytest.mark.parametrize(("name", "hidden_size"), [("qwen2.5-coder-0.5b", 896), ("qwen2.5-coder-1.5b", 1536)])
def test_embedded_models_resolve_untied(name: str, hidden_size: int) -> None:
    source = resolve_model(name)
    assert (source.kind, source.config.hidden_size, source.config.vocab_size) == ("gguf", hidden_size, 151_936)
    assert not source.config.tie_word_embeddings
    assert source.config.rms_norm_eps == 1e-6
