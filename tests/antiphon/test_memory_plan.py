"""Memory is divided before anything is allocated: what is planned holds what is loaded, and is never over budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from antiphon.engine.config import ModelConfig, config_from_hf
from antiphon.engine.errors import CapacityError
from antiphon.engine.ledger import GIB, Ledger
from antiphon.engine.models.decoder import Decoder, matrix_bytes, weight_bytes
from antiphon.engine.pages import PAGE_TOKENS, KVCache
from antiphon.kernels.ops import KernelContext
from antiphon.kernels.registry import choose_kernels
from antiphon.memory_plan import new_ledger, plan_memory, workspace_bytes
from antiphon.precision import Precision

FLOAT32 = Precision(torch.float32, torch.float32, torch.float32)
BFLOAT16 = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
NATIVE = Precision(torch.float32, torch.bfloat16, torch.bfloat16)
INT8 = Precision(torch.float32, torch.int8, torch.int8)


def qwen_raw(hidden: int, size: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    }


def qwen(hidden: int, size: int, layers: int, heads: int) -> ModelConfig:
    return config_from_hf(qwen_raw(hidden, size, layers, heads))


WORKER, DRIVER = qwen(896, 4864, 24, 14), qwen(1536, 8960, 28, 12)


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, NATIVE, INT8])
@pytest.mark.parametrize("budget", [12 * GIB, 16 * GIB, 33 * GIB])
def test_two_models_fill_the_budget_and_no_more(budget: int, precision: Precision) -> None:
    ledger = Ledger(budget)
    plan = plan_memory(ledger, WORKER, DRIVER, precision, 1024)
    worker_page, driver_page = (KVCache.page_bytes(config, precision.kv) for config in (WORKER, DRIVER))
    assert ledger.entries == {
        "worker weights": weight_bytes(WORKER, precision.weights),
        "driver weights": weight_bytes(DRIVER, precision.weights),
        "workspaces": sum(workspace_bytes(config, 1024, precision.activations) for config in (WORKER, DRIVER)),
        "driver KV pool": plan.driver_pages * driver_page,
        "worker KV pool": plan.worker_pages * worker_page,
    }
    most = 4_194_304 // PAGE_TOKENS  # pages beyond this would serve nobody
    assert plan.worker_pages == most or 0 <= ledger.free_bytes < worker_page
    assert plan.worker_pages <= most and ledger.free_bytes >= 0
    assert plan.driver_pages <= 32_768 // PAGE_TOKENS


def test_one_model_for_both_roles_is_booked_once_and_shares_its_pages() -> None:
    ledger = Ledger(8 * GIB)
    plan = plan_memory(ledger, WORKER, None, FLOAT32, 1024)
    assert set(ledger.entries) == {"worker weights", "workspaces", "worker KV pool"}
    assert plan.driver_pages == plan.worker_pages > 0


def test_a_small_budget_gives_the_driver_half_of_what_is_left_at_most() -> None:
    fixed = Ledger(100 * GIB)
    plan_memory(fixed, WORKER, DRIVER, FLOAT32, 1024)
    weights = sum(size for holder, size in fixed.entries.items() if "pool" not in holder)
    ledger = Ledger(weights + GIB)
    plan_memory(ledger, WORKER, DRIVER, FLOAT32, 1024)
    assert ledger.entries["driver KV pool"] <= GIB // 2


@pytest.mark.parametrize(
    ("budget", "message"), [(GIB, "worker weights needs"), (4 * GIB, "driver weights needs"), (0, "worker weights")]
)
def test_weights_that_do_not_fit_are_refused_by_name(budget: int, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        plan_memory(Ledger(budget), WORKER, DRIVER, FLOAT32, 1024)


def test_a_pool_too_small_to_work_with_is_refused_with_the_knob() -> None:
    weights = weight_bytes(WORKER, torch.float32) + workspace_bytes(WORKER, 1024, torch.float32)
    minimum = 1024 * WORKER.kv_bytes_per_token(4)
    with pytest.raises(CapacityError, match=r"the worker KV pool needs at least .* \(1024 tokens\).*--memory"):
        plan_memory(Ledger(weights + minimum - 1), WORKER, None, FLOAT32, 1024)
    assert plan_memory(Ledger(weights + minimum), WORKER, None, FLOAT32, 1024).worker_pages == 16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("only", [None, "torch_onednn", "reference"])
def test_loaded_weights_fit_what_was_booked_for_them(family: str, tied: bool, only: str | None) -> None:
    """The plan may round up, by a tenth at most, and never down."""
    model = tiny.random_hf_model(family, tied=tied)
    config = config_from_hf(model.config.to_dict())
    kernels = choose_kernels(
        KernelContext("cpu", torch.float32, torch.float32, torch.float32, config.head_dim), only=only
    )
    decoder = Decoder.load(config, kernels, tiny.StateDictCheckpoint(tiny.hf_tensors(model)), torch.float32)
    booked = weight_bytes(config, torch.float32)
    assert decoder.num_bytes <= booked <= 1.1 * decoder.num_bytes


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_int8_weights_of_a_real_width_fit_what_was_booked_for_them(tied: bool, only: str | None) -> None:
    """Sizes of the 0.5B with a layer and a small vocabulary: tiny ones would be mostly padding."""
    raw = {**qwen_raw(896, 4864, 1, 14), "vocab_size": 1024, "tie_word_embeddings": tied}
    config = config_from_hf(raw)
    kernels = choose_kernels(KernelContext("cpu", torch.float32, torch.int8, torch.int8, config.head_dim), only=only)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**{key: value for key, value in raw.items() if key != "model_type"}))
    tensors = {name: torch.ones(value.shape) for name, value in tiny.hf_tensors(model).items()}
    decoder = Decoder.load(config, kernels, tiny.StateDictCheckpoint(tensors), torch.float32, torch.int8)
    booked = weight_bytes(config, torch.int8)
    assert decoder.num_bytes <= booked <= 1.1 * decoder.num_bytes


def test_int8_weights_take_a_byte_and_a_scale_for_each_output_beside_a_bfloat16_embedding() -> None:
    """Of the 0.5B: 358M parameters in layers, 136M in the head, which has two planes, and again in the embedding."""
    layers = 24 * (896 * (2 * 896 + 2 * 128) + 3 * 896 * 4864)
    outputs = 24 * (896 + 2 * 128 + 896 + 2 * 4864 + 896) + 2 * 151_936
    head = 896 * 151_936
    assert matrix_bytes(WORKER, torch.int8) == layers + 2 * head + 4 * outputs
    rest = weight_bytes(WORKER, torch.int8) - matrix_bytes(WORKER, torch.int8)
    vectors_and_sums = 24 * 8 * 896 * 4 + 32 * 896 + 4 * (outputs + 64)
    assert 2 * head <= rest <= 2 * head + vectors_and_sums
    assert weight_bytes(WORKER, torch.int8) < 0.73 * weight_bytes(WORKER, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_pages_take_what_was_booked_for_them(dtype: torch.dtype) -> None:
    config = replace(WORKER, num_layers=2)
    kernels = choose_kernels(KernelContext("cpu", torch.float32, torch.float32, dtype, 64), only="reference")
    cache = KVCache(config, 3, dtype, kernels)
    assert cache.num_bytes == 3 * KVCache.page_bytes(config, dtype)


def test_narrow_keys_and_values_leave_room_for_more_tokens() -> None:
    def pages(kv: torch.dtype) -> int:
        return plan_memory(Ledger(4 * GIB), WORKER, None, replace(FLOAT32, kv=kv), 1024).worker_pages

    wide = pages(torch.float32)
    assert 2 * wide <= pages(torch.bfloat16) <= 2 * wide + 1
    # 64 bytes and a scale of 4 for each vector, where float32 has 256.
    assert pages(torch.int8) == pytest.approx(wide * 256 / 68, abs=4)


def test_a_ledger_is_the_given_budget_or_what_is_free_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.memory_plan.available_bytes", lambda: 5 * GIB)
    assert new_ledger(123).budget_bytes == 123
    assert new_ledger(None).budget_bytes == 4 * GIB
    monkeypatch.setattr("antiphon.memory_plan.available_bytes", lambda: GIB // 2)
    assert new_ledger(None).budget_bytes == 0
