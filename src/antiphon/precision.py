"""What an engine's numbers are kept in: asked for by three options, decided once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from antiphon.engine.errors import InputError
from antiphon.kernels import native
from antiphon.kernels.torch_cpu import bf16_is_fast

DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("none", "int8")
KV_CACHE_DTYPES = ("auto", "float32", "bf16", "int8")
_KV_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Precision:
    """Dtypes of the activations, of the matrices, and of the stored keys and values (KV)."""

    activations: torch.dtype
    weights: torch.dtype
    kv: torch.dtype

    def __str__(self) -> str:
        activations, weights, kv = (
            str(dtype).removeprefix("torch.") for dtype in (self.activations, self.weights, self.kv)
        )
        if weights == kv:
            return activations if activations == weights else f"{activations}, weights and KV in {weights}"
        narrow = (("weights", weights), ("KV", kv))
        return ", ".join([activations, *(f"{what} in {name}" for what, name in narrow if name != activations)])


def choose_precision(dtype: str, quantization: str, kv_cache_dtype: str) -> Precision:
    """What the three options mean on this machine; raises `InputError` for what is unknown or cannot be served.

    | dtype    | native kernels                      | without, bfloat16 fast | without, not fast            |
    |----------|-------------------------------------|------------------------|------------------------------|
    | float32  | float32 throughout                  | float32 throughout     | float32 throughout           |
    | bfloat16 | float32, weights and KV in bfloat16 | bfloat16 throughout    | float32, weights in bfloat16 |
    | auto     | as bfloat16                         | as bfloat16            | as float32                   |

    Fast is where oneDNN has instructions for bfloat16. `int8` quantises the matrices and needs the native kernels.
    `kv_cache_dtype` other than auto is taken as it stands; where only the reference serves it, attention is slow, and
    `antiphon doctor` says so.
    """
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("quantization", quantization, QUANTIZATIONS),
        ("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES),
    ):
        if value not in known:
            raise InputError(f"{name} {value!r} is unknown, known are {', '.join(known)}")
    missing = native.available()
    if missing is None:
        _check_instruction_set()
    if quantization == "int8":
        if dtype == "float32":
            raise InputError("dtype float32 is float32 throughout, it does not go with quantization int8: drop one")
        if missing is not None:
            raise InputError(f"quantization int8 needs the native kernels: {missing}")
    wide, narrow = torch.float32, torch.bfloat16
    if dtype == "float32" or (dtype == "auto" and missing is not None and not bf16_is_fast()):
        chosen = Precision(wide, wide, wide)
    elif missing is None:
        chosen = Precision(wide, torch.int8 if quantization == "int8" else narrow, narrow)
    else:
        activations = narrow if bf16_is_fast() else wide
        chosen = Precision(activations, narrow, activations)
    if kv_cache_dtype == "auto":
        return chosen
    return Precision(chosen.activations, chosen.weights, _KV_DTYPES[kv_cache_dtype])


def _check_instruction_set() -> None:
    try:
        native.isa()
    except ValueError as error:
        raise InputError(str(error)) from error
