"""A model as a Hugging Face folder of safetensors, which is what vLLM and OpenVINO read: from a GGUF file, dequantised.

    python benchmarks/peers/hf_folder.py --model qwen2.5-coder-0.5b --out DIR --dtype bfloat16

`--dtype w8a8` writes what llm-compressor would by round-to-nearest: int8 matrices with a scale for each output, in the
`compressed-tensors` format; activations are then quantised token by token by whoever runs it. The head stays bfloat16.
Runs in the project's own environment.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from antiphon.engine.config import ModelConfig
from antiphon.engine.model_source import ModelSource, resolve_model

DTYPES = ("float32", "bfloat16", "w8a8")
_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def main() -> int:
    """Write the folder that the flags name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an embedded name, a .gguf file or a folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments = parser.parse_args()
    write_hf_folder(resolve_model(arguments.model), arguments.out, arguments.dtype)
    return 0


def write_hf_folder(source: ModelSource, folder: Path, dtype: str) -> Path:
    """Weights, config.json and tokenizer in `folder`, which is made whole or not at all; kept where it is there."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(dict(_tensors(source, dtype)), partial / "model.safetensors", metadata={"format": "pt"})
    tokenizer = source.tokenizer()
    tokenizer.hf.save_pretrained(partial)
    config = _config(source.config, dtype) | {"eos_token_id": sorted(tokenizer.eos_ids)}
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    partial.rename(folder)
    return folder


def quantise_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight [out, in]` → int8 of the same shape and float32 scales `[out, 1]`, absmax / 127 of each output."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return torch.round(weight.float() / scale.clamp_min(1e-30)).to(torch.int8), scale


def _tensors(source: ModelSource, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    dense = torch.float32 if dtype == "float32" else torch.bfloat16
    with source.open() as checkpoint:
        for name in checkpoint.names():
            tensor = checkpoint.read(name)
            if dtype == "w8a8" and name.endswith("_proj.weight"):
                weight, scale = quantise_channels(tensor)
                yield name, weight
                yield f"{name}_scale", scale.to(dense)
            else:
                yield name, tensor.to(dense).contiguous()


def _config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.attention_bias,
        "use_sliding_window": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32" if dtype == "float32" else "bfloat16",
    }
    if dtype == "w8a8":
        integers = {"num_bits": 8, "type": "int", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": integers | {"strategy": "channel", "dynamic": False},
            "input_activations": integers | {"strategy": "token", "dynamic": True},
        }
        fields["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
    return fields


if __name__ == "__main__":
    sys.exit(main())
