"""torch's own fast paths on the CPU: oneDNN linear with packed weights, and flash attention over runs of pages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.attention_plan import AttentionPlan, AttentionRow, Run
from antiphon.kernels.ops import ONE_PLANE, KernelContext, LayerCache, PackedLinear, Planes, Weight, whole
from antiphon.kernels.reference import gather_runs, hadamard, rotate, stored_form

# oneDNN lays a weight out for an expected number of rows; it serves any number.
_EXPECTED_ROWS = 256


@dataclass(frozen=True)
class OneDnnLinear:
    """A weight in oneDNN's blocked layout."""

    packed: Tensor
    bias: Tensor | None
    num_bytes: int

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias (+ residual)`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out if residual is None else out.add_(residual)


def linear_reason(context: KernelContext) -> str | None:
    """Why oneDNN cannot serve, or None."""
    if not torch._C._has_mkldnn:
        return "this torch is built without oneDNN"
    if context.dtype != context.weight_dtype:
        return f"weights in {context.weight_dtype} under activations in {context.dtype} are not served"
    if context.dtype == torch.bfloat16 and not bf16_is_fast():
        return "oneDNN needs AVX-512 or AMX for bfloat16, which this processor lacks"
    return None


def bf16_is_fast() -> bool:
    """Whether oneDNN computes bfloat16 with the processor's own instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(weight: Weight, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear:
    """See `ops.PackLinear`."""
    weight = whole(weight)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
    return OneDnnLinear(packed, bias, weight.nbytes + (0 if bias is None else bias.nbytes))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.RmsNorm`. In fp32 without a widened copy; else as the reference."""
    if x.dtype != torch.float32:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return weight * wide.mul_(scale).to(x.dtype)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    scaled: Tensor = x * scale
    return scaled.mul_(weight)


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, slots: Tensor
) -> Tensor:
    """See `ops.RotaryAndStore`. `index_copy_` writes each head's rows once."""
    for x, pool, scales in ((rotate(k, cos, sin), cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        stored, scale = stored_form(x.transpose(0, 1), pool.dtype)
        pool.index_copy_(1, slots, stored)
        if scales is not None:
            scales.index_copy_(1, slots, scale)
    return rotate(q, cos, sin)


def silu_and_mul(gate_up: Tensor, block: int = 1) -> Tensor:
    """See `ops.SiluAndMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gated = torch.nn.functional.silu(gate).mul_(up)
    return gated if block == 1 else hadamard(gated, block)


def attention_reason(context: KernelContext) -> str | None:
    """Why torch's flash attention cannot serve, or None: it reads keys and values as they lie in the cache."""
    if context.kv_dtype != context.dtype:
        return f"keys and values in {context.kv_dtype} under activations in {context.dtype} are not served"
    return None


def paged_attention(q: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor:
    """See `ops.PagedAttention`. Every distinct context run is read once for all rows that see it; partial results
    are merged by their log-sum-exp (the cascade of Flash-Decoding), so that no key or value is copied."""
    num_tokens, num_heads, head_dim = q.shape
    merged = _Merge(num_tokens, num_heads, head_dim)
    readers: dict[Run, list[AttentionRow]] = defaultdict(list)
    for row in plan.rows:
        for run in row.context:
            readers[run].append(row)
        merged.add(row.start, row.stop, *_own_attention(q[row.start : row.stop], cache, row.own))
    for run, rows in readers.items():
        queries = [q[row.start : row.stop] for row in rows]
        out, log_sum = _run_attention(torch.cat(queries) if len(rows) > 1 else queries[0], cache, run)
        start = 0
        for row in rows:
            stop = start + row.stop - row.start
            merged.add(row.start, row.stop, out[start:stop], log_sum[start:stop])
            start = stop
    return merged.out.to(q.dtype).reshape(num_tokens, num_heads * head_dim)


class _Merge:
    """Sums partial attention results, each weighted by its share of the whole softmax denominator."""

    def __init__(self, num_tokens: int, num_heads: int, head_dim: int) -> None:
        self.out = torch.empty(num_tokens, num_heads, head_dim)
        self.log_sum = torch.empty(num_tokens, num_heads)
        self._seen: set[int] = set()

    def add(self, start: int, stop: int, out: Tensor, log_sum: Tensor) -> None:
        """Adds `out [tokens, heads, head_dim]` with `log_sum [tokens, heads]` to tokens `start` to `stop - 1`."""
        if start not in self._seen:
            self._seen.add(start)
            self.out[start:stop], self.log_sum[start:stop] = out, log_sum
            return
        so_far = self.log_sum[start:stop]
        total = torch.logaddexp(so_far, log_sum)
        self.out[start:stop].mul_((so_far - total).exp_().unsqueeze(-1))
        self.out[start:stop].addcmul_(out.float(), (log_sum - total).exp_().unsqueeze(-1))
        self.log_sum[start:stop] = total


def _run_attention(q: Tensor, cache: LayerCache, run: Run) -> tuple[Tensor, Tensor]:
    """All of `q [tokens, heads, head_dim]` over one run. The query heads of a KV head are laid out as more tokens
    of it, so that its keys are read once."""
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = cache.k.shape[0]
    grouped = q.view(num_tokens, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    span = slice(run.first_slot, run.first_slot + run.num_tokens)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, cache.k[None, :, span], cache.v[None, :, span]
    )
    out = out.view(kv_heads, num_tokens, -1, head_dim).transpose(0, 1).reshape(num_tokens, num_heads, head_dim)
    return out, log_sum.view(kv_heads, num_tokens, -1).transpose(0, 1).reshape(num_tokens, num_heads)


def _own_attention(q: Tensor, cache: LayerCache, own: tuple[Run, ...]) -> tuple[Tensor, Tensor]:
    """Causal attention of a row's new tokens to each other. A lone token takes the grouped form."""
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 1:
        return _run_attention(q, cache, own[0])
    num_groups = num_heads // cache.k.shape[0]
    keys, values = (
        gather_runs(pool, own)[:, None].expand(-1, num_groups, -1, -1).reshape(1, num_heads, num_tokens, head_dim)
        for pool in (cache.k, cache.v)
    )
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1).unsqueeze(0), keys, values, 0.0, True
    )
    return out[0].transpose(0, 1), log_sum[0].transpose(0, 1)
