"""Three options say what everything is kept in; what cannot be served is refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from antiphon import precision as module
from antiphon.assembly import EngineOptions
from antiphon.engine.errors import InputError
from antiphon.precision import Precision, choose_precision

WIDE, NARROW, INT8 = torch.float32, torch.bfloat16, torch.int8


def machine(monkeypatch: pytest.MonkeyPatch, *, native: bool, fast: bool) -> None:
    """A machine with or without native kernels, with or without bfloat16 instructions."""
    monkeypatch.setattr(module.native, "available", lambda: None if native else "there is no g++")
    monkeypatch.setattr(module, "bf16_is_fast", lambda: fast)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization", "expected"),
    [
        ("auto", "none", Precision(WIDE, NARROW, NARROW)),
        ("bfloat16", "none", Precision(WIDE, NARROW, NARROW)),
        ("auto", "int8", Precision(WIDE, INT8, NARROW)),
        ("bfloat16", "int8", Precision(WIDE, INT8, NARROW)),
        ("float32", "none", Precision(WIDE, WIDE, WIDE)),
    ],
)
def test_native_kernels_have_float32_activations_whatever_the_processor(
    dtype: str, quantization: str, expected: Precision, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, native=True, fast=fast)
    assert choose_precision(dtype, quantization, "auto") == expected


@pytest.mark.parametrize(
    ("dtype", "fast", "expected"),
    [
        ("auto", False, Precision(WIDE, WIDE, WIDE)),
        ("auto", True, Precision(NARROW, NARROW, NARROW)),
        ("bfloat16", False, Precision(WIDE, NARROW, WIDE)),
        ("bfloat16", True, Precision(NARROW, NARROW, NARROW)),
        ("float32", True, Precision(WIDE, WIDE, WIDE)),
    ],
)
def test_without_native_kernels_keys_and_values_are_kept_as_activations_are(
    dtype: str, fast: bool, expected: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, native=False, fast=fast)
    assert choose_precision(dtype, "none", "auto") == expected


@pytest.mark.parametrize(("name", "kv"), [("float32", WIDE), ("bf16", NARROW), ("int8", INT8)])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("native", [False, True])
def test_a_kv_cache_dtype_is_taken_as_it_is_given(
    native: bool, dtype: str, name: str, kv: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, native=native, fast=False)
    auto = choose_precision(dtype, "none", "auto")
    assert choose_precision(dtype, "none", name) == Precision(auto.activations, auto.weights, kv)


def test_what_is_unknown_or_cannot_be_served_is_refused_with_the_options_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, native=True, fast=False)
    for options, message in (
        ({"dtype": "fp8"}, "dtype 'fp8' is unknown, known are auto"),
        ({"quantization": "int4"}, "quantization 'int4' is unknown, known are none, int8"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype 'bfloat16' is unknown, known are auto, float32, bf16, int8"),
        ({"dtype": "float32", "quantization": "int8"}, "dtype float32 .* does not go with quantization int8"),
    ):
        with pytest.raises(InputError, match=message):
            EngineOptions(**options)
    assert EngineOptions(quantization="int8").precision.weights == INT8
    machine(monkeypatch, native=False, fast=True)
    with pytest.raises(InputError, match=r"int8 needs the native kernels: there is no g\+\+"):
        EngineOptions(quantization="int8")


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (Precision(WIDE, WIDE, WIDE), "float32"),
        (Precision(WIDE, NARROW, NARROW), "float32, weights and KV in bfloat16"),
        (Precision(WIDE, INT8, NARROW), "float32, weights in int8, KV in bfloat16"),
        (Precision(WIDE, NARROW, WIDE), "float32, weights in bfloat16"),
        (Precision(WIDE, WIDE, INT8), "float32, KV in int8"),
    ],
)
def test_a_precision_is_printed_so_that_it_can_be_read(precision: Precision, text: str) -> None:
    assert str(precision) == text


def test_no_two_precisions_are_printed_alike() -> None:
    """A prefix's key holds the text: keys and values of one precision must not be found under another."""
    every = [Precision(a, w, kv) for a in (WIDE, NARROW) for w in (WIDE, NARROW, INT8) for kv in (WIDE, NARROW, INT8)]
    assert len({str(precision) for precision in every}) == len(every)


def test_an_instruction_set_that_is_not_there_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(module.native.ISA_VARIABLE, "mmx")
    with pytest.raises(InputError, match="ANTIPHON_CPU_ISA is 'mmx'"):
        EngineOptions()
