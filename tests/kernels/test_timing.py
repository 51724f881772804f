"""Timed kernels give what the kernels give, and every call's seconds are added to its own operation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import count

import pytest
import torch
from torch import Tensor

from antiphon.kernels.ops import OPERATIONS, KernelContext, KernelSet, Norm
from antiphon.kernels.registry import choose_kernels
from antiphon.kernels.timing import KernelTimes, OperationTime, timed


def plain_kernels() -> KernelSet:
    return choose_kernels(KernelContext("cpu", torch.float32, torch.float32, torch.float32, 4), only="reference")


def timed_kernels(kernels: KernelSet) -> tuple[KernelSet, KernelTimes]:
    """By a clock that goes on by one second each time it is read."""
    times, ticks = KernelTimes(), count()
    return timed(kernels, times, lambda: float(next(ticks))), times


@dataclass(frozen=True)
class PlainLinear:
    """A fused norm and linear layer, as far as timing can tell."""

    norm: Norm
    weight: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.norm.weight * x, self.weight, self.bias)


@dataclass(frozen=True)
class PlainMlp:
    """A fused norm and gated MLP, likewise."""

    norm: Norm
    gate: Tensor
    up: Tensor
    down: Tensor
    block: int = 1

    @property
    def num_bytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm.weight * x
        return (torch.nn.functional.silu(normed @ self.gate.T) * (normed @ self.up.T)) @ self.down.T + x


def test_calls_are_counted_by_operation_and_linear_by_weight() -> None:
    kernels, times = timed_kernels(plain_kernels())
    x, weight, other = torch.randn(3, 4), torch.randn(6, 4), torch.randn(2, 4)
    layer, head = kernels.linear(weight, None), kernels.linear(other, None)
    assert times.operations == {}  # packing is not counted
    residual = torch.randn(3, 6)
    assert torch.equal(layer(x), x @ weight.T)
    assert torch.equal(layer(x, residual), x @ weight.T + residual)
    assert torch.equal(head(x), x @ other.T)
    assert layer.num_bytes == weight.nbytes
    expected = plain_kernels().silu_and_mul(x)
    assert torch.equal(kernels.silu_and_mul(x), expected)
    taken = times.take()
    assert taken == {
        "linear 6x4": OperationTime(2.0, 2),
        "linear 2x4": OperationTime(1.0, 1),
        "silu_and_mul": OperationTime(1.0, 1),
    }
    assert next(iter(taken)) == "linear 6x4"
    assert times.take() == {}


def test_every_operation_is_wrapped() -> None:
    plain = replace(plain_kernels(), normed_linear=PlainLinear, gated_mlp=PlainMlp)
    kernels, _ = timed_kernels(plain)
    assert {entry.name for entry in fields(kernels)} == set(OPERATIONS)
    for operation in OPERATIONS:
        assert getattr(kernels, operation) is not getattr(plain, operation), operation


def test_what_is_fused_is_timed_as_one_and_what_is_composed_stays_composed() -> None:
    composed = timed_kernels(plain_kernels())[0]
    assert composed.normed_linear is None and composed.gated_mlp is None
    kernels, times = timed_kernels(replace(plain_kernels(), normed_linear=PlainLinear, gated_mlp=PlainMlp))
    assert kernels.normed_linear is not None and kernels.gated_mlp is not None
    norm, weights = Norm(torch.randn(4), 1e-6), (torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6))
    mlp, plain_mlp = kernels.gated_mlp(norm, *weights), PlainMlp(norm, *weights)
    bias = torch.randn(6)
    linear, plain_linear = kernels.normed_linear(norm, weights[0], bias), PlainLinear(norm, weights[0], bias)
    assert times.operations == {}  # packing is not counted
    x = torch.randn(3, 4)
    assert torch.equal(mlp(x), plain_mlp(x)) and torch.equal(linear(x), plain_linear(x))
    assert (mlp.num_bytes, linear.num_bytes) == (plain_mlp.num_bytes, plain_linear.num_bytes)
    assert times.take() == {"gated_mlp 6x4": OperationTime(1.0, 1), "normed_linear 6x4": OperationTime(1.0, 1)}


def test_a_kernel_that_fails_is_counted_and_its_error_passed_on() -> None:
    def fail(gate_up: Tensor) -> Tensor:
        raise ValueError("no")

    kernels, times = timed_kernels(replace(plain_kernels(), silu_and_mul=fail))
    with pytest.raises(ValueError, match="no"):
        kernels.silu_and_mul(torch.zeros(1, 2))
    assert times.take() == {"silu_and_mul": OperationTime(1.0, 1)}


def test_the_native_log_prob_is_given_the_packed_head_itself() -> None:
    kernels, times = timed_kernels(choose_kernels(KernelContext("cpu", *[torch.float32] * 3, 4)))
    head = kernels.linear(torch.randn(40, 8), None)
    hidden, targets = torch.randn(3, 8), torch.tensor([0, 39, 7])
    expected = torch.log_softmax(head(hidden), dim=-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(kernels.log_prob(hidden, head, targets, 40), expected)
    assert times.take()["log_prob"].num_calls == 1
