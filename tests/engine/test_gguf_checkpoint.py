"""What the GGUF reader promises: the right numbers from a sound file, a `ModelError` from any other."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from antiphon.engine.errors import ModelError
from antiphon.engine.gguf_checkpoint import GgufCheckpoint, read_gguf_header
from antiphon.engine.model_source import resolve_model

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16", "IQ4_NL", "IQ4_XS")


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_uint32("qwen2.block_count", 2)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "<|im_end|>"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    return write_gguf(
        tmp_path / "small.gguf",
        {
            "token_embd.weight": rng.standard_normal((6, 32)).astype(np.float32),
            "blk.0.attn_q.weight": rng.standard_normal((4, 32)).astype(np.float16),
            "output_norm.weight": rng.standard_normal(32).astype(np.float32),
        },
    )


def header_bytes(fields: bytes = b"", num_fields: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + fields + tensors


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor_info(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_fields_and_tensors_equal_what_the_gguf_package_reads(small: Path) -> None:
    header, reader = read_gguf_header(small), gguf.GGUFReader(small)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            theirs = field.contents()
            ours = header.fields[name]
            assert (
                ours == pytest.approx(theirs) if isinstance(theirs, float) else theirs == ours or theirs == list(ours)
            )
    assert len(header.fields) == len(reader.fields) - 3
    with GgufCheckpoint(small) as checkpoint:
        assert checkpoint.names() == (
            "model.embed_tokens.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.norm.weight",
        )
        for name, tensor in zip(checkpoint.names(), reader.tensors, strict=True):
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert checkpoint.shape(name) == theirs.shape
            np.testing.assert_array_equal(checkpoint.read(name).numpy(), theirs)


def test_float_fields_come_back_as_they_were_written(small: Path) -> None:
    assert read_gguf_header(small).fields["qwen2.attention.layer_norm_rms_epsilon"] == 1e-6


@pytest.mark.parametrize("kind_name", QUANTISED)
@pytest.mark.parametrize("num_rows", [1, 600])
def test_quantised_tensors_equal_the_gguf_package_over_chunk_seams(
    tmp_path: Path, kind_name: str, num_rows: int
) -> None:
    kind = GGMLQuantizationType[kind_name]
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = 512 // block_elements * block_bytes
    raw = np.random.default_rng(1).integers(0, 256, (num_rows, row_bytes), dtype=np.uint8)
    path = tmp_path / "quantised.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"), GgufCheckpoint(path) as checkpoint:
        ours = checkpoint.read("model.embed_tokens.weight").numpy()
        np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, kind))
    assert ours.shape == (num_rows, 512)
    assert np.isfinite(ours).any()


def test_a_tensor_outlives_its_checkpoint_and_a_closed_one_refuses(small: Path) -> None:
    checkpoint = GgufCheckpoint(small)
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert norm.add_(1).shape == (32,)
    with pytest.raises(ModelError, match="closed"):
        checkpoint.read("model.norm.weight")
    with pytest.raises(ModelError, match="no tensor 'nope'"):
        checkpoint.read("nope")


def test_every_prefix_of_a_file_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GgufCheckpoint(cut)


def test_damaged_headers_never_raise_anything_but_a_model_error(small: Path, tmp_path: Path) -> None:
    whole, header_length = small.read_bytes(), read_gguf_header(small).data_offset
    rng = random.Random(7)
    damaged, num_refused = tmp_path / "damaged.gguf", 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(header_length)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        damaged.write_bytes(data)
        try:
            with GgufCheckpoint(damaged) as checkpoint:
                for name in checkpoint.names():
                    checkpoint.read(name)
        except ModelError:
            num_refused += 1
    assert 500 < num_refused < 1500


HUGE = 2**64 - 1
FIELD_U32 = struct.pack("<I", GGUFValueType.UINT32)
NESTED = struct.pack("<IQ", GGUFValueType.ARRAY, 1) * 50


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(40), "does not start with"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (header_bytes(num_tensors=HUGE), "tensors"),
        (header_bytes(num_fields=2**40), "fields"),
        (header_bytes(struct.pack("<Q", HUGE), 1), "string declares"),
        (header_bytes(struct.pack("<Q", 60_000), 1), "header ends"),
        (header_bytes((string(b"k") + FIELD_U32 + bytes(4)) * 2, 2), "twice"),
        (header_bytes(string(b"k") + struct.pack("<I", 99), 1), "value type 99"),
        (header_bytes(string(b"\xff") + FIELD_U32 + bytes(4), 1), "UTF-8"),
        (header_bytes(string(b"k") + struct.pack("<IIQ", 9, 4, HUGE), 1), "elements"),
        (header_bytes(string(b"k") + struct.pack("<IIQ", 9, 8, 2**61), 1), "elements"),
        (header_bytes(string(b"k") + struct.pack("<IIQQ", 9, 8, 1, HUGE), 1), "passes the header's end"),
        (header_bytes(string(b"k") + struct.pack("<I", 9) + NESTED, 1), "nested"),
        (header_bytes(string(b"general.alignment") + FIELD_U32 + struct.pack("<I", 0), 1), "alignment"),
        (header_bytes(string(b"general.alignment") + FIELD_U32 + struct.pack("<I", 48), 1), "alignment"),
        (header_bytes(string(b"split.count") + struct.pack("<IH", 2, 3), 1), "merge"),
        (header_bytes(tensors=tensor_info(b"t", [32] * 9), num_tensors=1), "9 dimensions"),
        (header_bytes(tensors=tensor_info(b"t", []), num_tensors=1), "0 dimensions"),
        (header_bytes(tensors=tensor_info(b"t", [2**32, 2**32]), num_tensors=1), "takes bytes"),
        (header_bytes(tensors=tensor_info(b"t", [2**63, 2]), num_tensors=1), "takes bytes"),
        (header_bytes(tensors=tensor_info(b"t", [0]), num_tensors=1), "shape"),
        (header_bytes(tensors=tensor_info(b"t", [33], kind=8), num_tensors=1), "multiples of 32"),
        (header_bytes(tensors=tensor_info(b"t", [8], kind=777), num_tensors=1), "unknown type 777"),
        (header_bytes(tensors=tensor_info(b"t", [8], kind=26), num_tensors=1), "I32"),
        (header_bytes(tensors=tensor_info(b"t", [8], offset=2**63), num_tensors=1), "takes bytes"),
        (header_bytes(tensors=tensor_info(b"t", [1], offset=4), num_tensors=1), "takes bytes"),
        (header_bytes(tensors=tensor_info(b"t", [8]) * 2, num_tensors=2), "twice"),
        (header_bytes(tensors=tensor_info(b"t", [8]) + tensor_info(b"u", [8]), num_tensors=2), "overlaps"),
        (
            header_bytes(tensors=tensor_info(b"rope_freqs.weight", [8]), num_tensors=1),
            "'rope_freqs.weight' is not known",
        ),
    ],
)
def test_hostile_headers_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data + bytes(64))
    with pytest.raises(ModelError, match=message):
        GgufCheckpoint(path)


@pytest.mark.embedded
def test_embedded_model_is_read_whole_and_right() -> None:
    source = resolve_model("qwen2.5-coder-0.5b")
    header = read_gguf_header(source.path)
    with source.open() as checkpoint:
        assert len(checkpoint.names()) == len(header.tensors) == 291
        down = header.tensors["blk.3.ffn_down.weight"]
        raw = np.memmap(source.path, mode="r")[down.offset : down.offset + down.num_bytes].reshape(down.shape[0], -1)
        theirs = gguf.quants.dequantize(raw, down.kind)
        np.testing.assert_array_equal(checkpoint.read("model.layers.3.mlp.down_proj.weight").numpy(), theirs)
        assert checkpoint.shape("lm_head.weight") == (151_936, 896)
