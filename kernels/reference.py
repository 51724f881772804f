"""Every operation in plain torch: the oracle that fast kernels are tested against, and the last that serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.attention_plan import AttentionPlan, Run
from antiphon.kernels.ops import ONE_PLANE, KernelContext, LayerCache, PackedLinear, Planes, Weight, whole
from antiphon.kernels.rotation import Rotation


@dataclass(frozen=True)
class PlainLinear:
    """The weight as it is: `[out, in]` row-major."""

    weight: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes held, bias included."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias (+ residual)`; a narrower weight is widened."""
        out = torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias)
        return out if residual is None else out + residual


def linear_reason(context: KernelContext) -> str | None:
    """Why the reference cannot serve, or None."""
    if not context.weight_dtype.is_floating_point:
        return f"keeps weights as they come, {context.weight_dtype} is not served"
    return None


def linear(weight: Weight, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear:
    """See `ops.PackLinear`."""
    return PlainLinear(whole(weight), bias)


def embedding(table: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ops.Embedding`."""
    return table[token_ids].to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.RmsNorm`. Rounds as transformers' Qwen2RMSNorm does: to x's dtype before the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x [tokens, heads, head_dim]`: its first half by cos, its second half against it by sin."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, slots: Tensor
) -> Tensor:
    """See `ops.RotaryAndStore`."""
    for x, pool, scales in ((rotate(k, cos, sin), cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        stored, scale = stored_form(x.transpose(0, 1), pool.dtype)
        pool[:, slots] = stored
        if scales is not None:
            scales[:, slots] = scale
    return rotate(q, cos, sin)


def stored_form(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x [..., head_dim]` as a cache of `dtype` holds it, and the scales `[...]` that int8 has (see `ops.LayerCache`),
    none of them used by another dtype. A vector with a NaN in it has scale NaN; one below 1e-35 is stored as zeros with
    scale 0, as 127 / absmax could overflow."""
    if dtype != torch.int8:
        return x.to(dtype), x.new_empty(0)
    wide = x.float()
    absmax = wide.abs().amax(-1)
    absmax = torch.where(absmax < 1e-35, 0, absmax)
    # By a tensor: torch divides a number by a tensor as reciprocal times number, which rounds twice.
    factor = torch.where(absmax == 0, 0, torch.full_like(absmax, 127) / absmax)
    return (wide * factor.unsqueeze(-1)).nan_to_num_(0).round_().to(torch.int8), absmax / 127


def gather_runs(pool: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """What a pool or its scales hold of all runs in order, `[kv_heads, tokens, …]`; a view where there is one run."""
    parts = [pool[:, run.first_slot : run.first_slot + run.num_tokens] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _gather_wide(pool: Tensor, scales: Tensor | None, runs: tuple[Run, ...]) -> Tensor:
    """Keys or values of all runs in fp32, `[kv_heads, tokens, head_dim]`."""
    wide = gather_runs(pool, runs).float()
    return wide if scales is None else wide * gather_runs(scales, runs).unsqueeze(-1)


def paged_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor:
    """See `ops.PagedAttention`. Scores of a row are written out whole, in fp32."""
    num_tokens, num_heads, head_dim = q.shape
    num_groups = num_heads // cache.k.shape[0]
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype)
    for row in plan.rows:
        runs = row.context + row.own
        keys = _gather_wide(cache.k, cache.k_scale, runs).repeat_interleave(num_groups, 0)
        values = _gather_wide(cache.v, cache.v_scale, runs).repeat_interleave(num_groups, 0)
        queries = q[row.start : row.stop].float().transpose(0, 1)
        scores = queries @ keys.transpose(1, 2) * head_dim**-0.5
        num_queries, num_keys = scores.shape[1:]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        out[row.start : row.stop] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out.reshape(num_tokens, num_heads * head_dim)


def silu_and_mul(gate_up: Tensor, block: int = 1) -> Tensor:
    """See `ops.SiluAndMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return hadamard(torch.nn.functional.silu(gate) * up, block)


def hadamard(x: Tensor, block: int) -> Tensor:
    """`x [..., size]`, every `block` of values times its Walsh-Hadamard matrix over sqrt(block), in the order of
    csrc/cpu/hadamard.h: in float32 the same bits."""
    step = block // 2
    wide = x.float()
    while step > 0:
        first, second = wide.reshape(*x.shape[:-1], -1, 2, step).unbind(-2)
        wide = torch.stack([first + second, first - second], dim=-2).view(x.shape)
        step //= 2
    return (wide * (1 / torch.tensor(float(block)).sqrt())).to(x.dtype)


def rotate_channels(x: Tensor, rotation: Rotation, columns: bool = False) -> Tensor:
    """See `ops.RotateChannels`. In float64."""
    matrix = rotation.matrix()
    return x.copy_(matrix.T @ x.double() if columns else x.double() @ matrix)


def copy_pages(pool: Tensor, page_tokens: int, source: list[int], target: list[int]) -> None:
    """See `ops.CopyPages`."""
    paged = pool.view(*pool.shape[:2], -1, page_tokens, *pool.shape[3:])
    paged[:, :, target] = paged[:, :, source]


def log_prob(hidden: Tensor, head: PackedLinear, targets: Tensor, vocab_size: int) -> Tensor:
    """See `ops.LogProb`. 64 rows of logits at a time."""
    parts = []
    for start in range(0, hidden.shape[0], 64):
        logits = head(hidden[start : start + 64])[:, :vocab_size].float()
        chosen = logits.gather(1, targets[start : start + 64, None]).squeeze(1)
        parts.append(chosen - torch.logsumexp(logits, dim=-1))
    return torch.cat(parts) if parts else torch.empty(0)


def peak(logits: Tensor, allowed: Tensor | None = None) -> tuple[float, int, bool]:
    """See `ops.FindPeak`."""
    has_nan = bool(torch.isnan(logits).any())
    seen = logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))
    if has_nan:
        seen = seen.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    if seen.numel() == 0:
        return float("-inf"), -1, has_nan
    index = int(seen.argmax())  # the first of equals
    largest = float(seen[index])
    return largest, index if largest > float("-inf") else -1, has_nan
