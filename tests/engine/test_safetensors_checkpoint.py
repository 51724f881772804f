"""What a safetensors folder promises: every tensor once, from the folder's own files, or a `ModelError`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from antiphon.engine.errors import ModelError
from antiphon.engine.safetensors_checkpoint import SafetensorsCheckpoint, weight_files

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / FIRST)
    save_file({"c": torch.full((2,), 3.0, dtype=torch.float16)}, tmp_path / SECOND)
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path


def test_sharded_folder_gives_every_tensor_with_its_own_dtype(sharded: Path) -> None:
    with SafetensorsCheckpoint(sharded) as checkpoint:
        assert sorted(checkpoint.names()) == ["a", "b", "c"]
        assert checkpoint.shape("a") == (2, 3)
        kept = checkpoint.read("a")
        assert [checkpoint.read(name).dtype for name in "abc"] == [torch.float32, torch.bfloat16, torch.float16]
    assert torch.equal(kept, torch.arange(6.0).reshape(2, 3))
    with pytest.raises(ModelError, match="closed"):
        checkpoint.read("a")


def test_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert weight_files(tmp_path) == (tmp_path / "model.safetensors",)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == ("a",)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match="only safetensors and GGUF"):
        SafetensorsCheckpoint(tmp_path)


def test_index_naming_a_missing_file_is_refused(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(ModelError, match=r"names 'model-00002-of-00002\.safetensors', which is missing"):
        SafetensorsCheckpoint(sharded)


def test_tensor_in_two_files_is_refused(sharded: Path) -> None:
    save_file({"c": torch.zeros(2), "a": torch.zeros(1)}, sharded / SECOND)
    with pytest.raises(ModelError, match="'a' stands in two files"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x.safetensors", "x.bin", ".."]
)
def test_index_leaving_the_folder_is_refused(sharded: Path, name: str) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(ModelError, match="not a safetensors file of this folder"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}, "the index, but not"),
        ({"a": FIRST, "c": SECOND}, "the files, but"),
    ],
)
def test_index_and_files_must_agree(sharded: Path, weight_map: dict[str, str], message: str) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(ModelError, match=message):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1, "a": 2}}', "[" * 100_000],
)
def test_malformed_indexes_are_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError):
        SafetensorsCheckpoint(sharded)


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            SafetensorsCheckpoint(tmp_path)


def test_impossible_shapes_and_foreign_dtypes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match="not a readable safetensors"):
        SafetensorsCheckpoint(tmp_path)
    save_file({"a": torch.ones(4, dtype=torch.int64)}, path)
    with pytest.raises(ModelError, match="dtype I64"):
        SafetensorsCheckpoint(tmp_path)
