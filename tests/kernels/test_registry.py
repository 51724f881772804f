"""The first candidate that can serve is taken, and every other one says why it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from antiphon.kernels import native, native_normed, reference, reference_int8, registry, torch_cpu
from antiphon.kernels.native_int8 import NativeInt8Linear
from antiphon.kernels.ops import OPERATIONS, KernelContext
from antiphon.kernels.registry import COMPOSED, candidates, choose_kernels, report

FLOAT32 = KernelContext("cpu", torch.float32, torch.float32, torch.float32, 64)


def test_every_operation_ends_with_the_reference_that_always_serves() -> None:
    for operation in OPERATIONS:
        last = candidates(operation)[-1]
        if operation in COMPOSED:  # of operations that the reference has
            assert (last.name, last.kernel) == (COMPOSED[operation], None)
        else:
            assert (last.name, last.kernel) == ("reference", getattr(reference, operation))
        assert last.reason(KernelContext("cuda", torch.float16, torch.float16, torch.float16, 80)) is None


def test_the_native_linear_serves_float32_and_is_batch_invariant() -> None:
    if native.available() is not None:
        pytest.skip(f"no native kernels here: {native.available()}")
    weight, x = torch.randn(50, 40), torch.randn(9, 40)
    packed = choose_kernels(FLOAT32).linear(weight, None)
    assert isinstance(packed, native.NativePackedLinear)
    assert torch.equal(packed(x)[4:5], packed(x[4:5]))


def test_without_the_extension_the_next_candidate_serves_and_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry.native, "available", lambda: "the C++ extension is not there")
    assert choose_kernels(FLOAT32).linear is torch_cpu.linear
    linear = next(entry for entry in report(FLOAT32) if entry.operation == "linear")
    assert linear.candidates[0] == ("native", False, "the C++ extension is not there")
    assert next(name for name, serves, _ in linear.candidates if serves) == "torch_onednn"


def test_only_reference_takes_the_oracle_everywhere() -> None:
    chosen = choose_kernels(FLOAT32, only="reference")
    for operation in OPERATIONS:
        assert getattr(chosen, operation) is getattr(reference, operation, None)
    assert {operation for operation in OPERATIONS if not hasattr(reference, operation)} == set(COMPOSED)


@pytest.mark.parametrize("name", ["referense", "native_int8", *COMPOSED.values()])
def test_only_refuses_a_name_that_no_candidate_has(name: str) -> None:
    """An int8 form goes by its family's name: by its own it would leave all else to the reference, unsaid."""
    with pytest.raises(ValueError, match=f"no kernels are named '{name}'"):
        choose_kernels(FLOAT32, only=name)


def test_the_report_names_the_chosen_candidate_and_a_reason_for_every_refusal() -> None:
    context = KernelContext("cuda", torch.float32, torch.float32, torch.float32, 64)
    for entry in report(context):
        for name, serves, reason in entry.candidates:
            assert serves == (name in ("reference", *COMPOSED.values()))
            assert bool(reason) != serves
    chosen = choose_kernels(context)
    assert chosen.paged_attention is reference.paged_attention
    assert [entry.operation for entry in report(context)] == list(OPERATIONS)


def test_keys_and_values_that_flash_attention_cannot_read_are_served_by_another_and_the_report_says_so() -> None:
    for kv_dtype in (torch.bfloat16, torch.int8):
        context = replace(FLOAT32, kv_dtype=kv_dtype)
        entry = next(entry for entry in report(context) if entry.operation == "paged_attention")
        refused = {name: reason for name, serves, reason in entry.candidates if not serves}
        assert "keys and values" in refused["torch_flash"]
        assert choose_kernels(context).paged_attention is not torch_cpu.paged_attention


def test_what_nobody_serves_is_refused_with_every_reason() -> None:
    with pytest.raises(ValueError, match=r"no kernel serves linear for .*uint8.*reference: keeps weights"):
        choose_kernels(replace(FLOAT32, weight_dtype=torch.uint8))


def test_int8_weights_are_served_natively_and_without_the_extension_in_torch_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = replace(FLOAT32, weight_dtype=torch.int8)
    weight, bias, x = torch.randn(50, 40), torch.randn(50), torch.randn(9, 40)
    oracle = choose_kernels(context, only="reference").linear(weight, bias)
    assert isinstance(oracle, reference_int8.Int8PlainLinear)
    if native.available() is None:
        monkeypatch.setenv(native.ISA_VARIABLE, "portable")
        packed = choose_kernels(context).linear(weight, bias)
        assert isinstance(packed, NativeInt8Linear)
        assert torch.equal(packed(x), oracle(x))
    monkeypatch.setattr(registry.native, "available", lambda: "the C++ extension is not there")
    assert choose_kernels(context).linear is reference_int8.linear
    assert torch.nn.functional.cosine_similarity(oracle(x), x @ weight.T + bias).min() > 0.999


FUSED = {
    "normed_linear": (native_normed.pack_normed_linear, native_normed.pack_int8_normed_linear),
    "gated_mlp": (native_normed.pack_gated_mlp, native_normed.pack_int8_gated_mlp),
}


@pytest.mark.parametrize("operation", COMPOSED)
@pytest.mark.parametrize(
    ("isa", "weight_dtype", "serving"),
    [
        ("amx", torch.bfloat16, "native"),
        ("amx", torch.int8, "native_int8"),
        ("amx", torch.float32, None),
        ("avx512_bf16", torch.bfloat16, None),
        ("avx512", torch.bfloat16, None),
        ("avx2", torch.int8, None),
    ],
)
def test_what_follows_a_norm_is_one_kernel_on_amx_and_composed_elsewhere(
    operation: str, isa: str, weight_dtype: torch.dtype, serving: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine has: choosing packs nothing."""
    if native.available() is not None:
        pytest.skip(f"no native kernels here: {native.available()}")
    monkeypatch.setattr(native_normed.native, "isa", lambda: isa)
    context = replace(FLOAT32, weight_dtype=weight_dtype)
    entry = next(entry for entry in report(context) if entry.operation == operation)
    chosen = next(name for name, serves, _ in entry.candidates if serves)
    assert chosen == (serving or COMPOSED[operation])
    kernels = dict(zip(("native", "native_int8"), FUSED[operation], strict=True))
    found = next(candidate.kernel for candidate in candidates(operation) if candidate.name == chosen)
    assert found is kernels.get(chosen)
    refused = {name: reason for name, serves, reason in entry.candidates if not serves}
    if isa != "amx":
        own = "native" if weight_dtype == torch.bfloat16 else "native_int8"
        assert refused[own] == f"is for AMX tiles; {isa} runs one operation after the other"


@pytest.mark.parametrize("operation", COMPOSED)
def test_the_chosen_kernel_of_what_follows_a_norm_is_the_one_of_the_report(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.available() is not None:
        pytest.skip(f"no native kernels here: {native.available()}")
    fused = dict(zip((torch.bfloat16, torch.int8), FUSED[operation], strict=True))
    for isa in native.supported_isas():
        monkeypatch.setenv(native.ISA_VARIABLE, isa)
        for weight_dtype in (torch.float32, torch.bfloat16, torch.int8):
            expected = fused.get(weight_dtype) if isa == "amx" else None
            context = replace(FLOAT32, weight_dtype=weight_dtype)
            assert getattr(choose_kernels(context), operation) is expected
            assert getattr(choose_kernels(context, only="native"), operation) is expected


@pytest.mark.parametrize("operation", COMPOSED)
def test_without_the_extension_what_follows_a_norm_is_composed(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.native, "available", lambda: "the C++ extension is not there")
    assert getattr(choose_kernels(replace(FLOAT32, weight_dtype=torch.bfloat16)), operation) is None
