"""What the native kernels that read or write a layer's cache check of it."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.ops import LayerCache

PAGE_TOKENS = 64  # csrc/cpu/kv_layer.h
STORAGES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}


def check_cache(cache: LayerCache) -> None:
    """TypeError or ValueError unless `cache` is as `ops.LayerCache` says, on the CPU, in whole pages."""
    k, v = cache.k, cache.v
    if k.dtype not in STORAGES or v.dtype != k.dtype or k.device.type != "cpu" or v.device.type != "cpu":
        raise TypeError(
            f"keys are {k.dtype} on {k.device} and values {v.dtype} on {v.device}; need one of float32, bfloat16 and "
            "int8, on the CPU"
        )
    if k.dim() != 3 or k.shape != v.shape or k.shape[1] % PAGE_TOKENS or 0 in k.shape:
        raise ValueError(
            f"keys are {tuple(k.shape)} and values {tuple(v.shape)}; need [kv_heads, pages * {PAGE_TOKENS}, head_dim]"
        )
    if not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError(f"keys have strides {k.stride()} and values {v.stride()}; both must be contiguous")
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if (scale is not None) != (k.dtype == torch.int8):
            raise ValueError(f"{name} goes with int8 keys and values alone; they are {k.dtype}, it is {scale!r:.20}")
        if scale is not None:
            check_float32(name, scale)
            if scale.shape != k.shape[:2] or not scale.is_contiguous():
                raise ValueError(f"{name} is {tuple(scale.shape)}; need contiguous {tuple(k.shape[:2])}")


def check_float32(name: str, tensor: Tensor) -> None:
    """TypeError unless `tensor` is float32 on the CPU."""
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; need float32 on the CPU")


def addresses(cache: LayerCache) -> tuple[int, int, int, int]:
    """Of keys, values, and their scales, which are 0 where there are none."""
    k_scale, v_scale = (0 if scale is None else scale.data_ptr() for scale in (cache.k_scale, cache.v_scale))
    return cache.k.data_ptr(), cache.v.data_ptr(), k_scale, v_scale
