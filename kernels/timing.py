"""Where a model's time goes: kernels that add up their own seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from antiphon.kernels.ops import ONE_PLANE, KernelSet, Norm, PackedBlock, PackedLinear, Planes, Weight

Clock = Callable[[], float]


@dataclass(frozen=True)
class OperationTime:
    """What the calls of one operation took together."""

    seconds: float = 0.0
    num_calls: int = 0


@dataclass
class KernelTimes:
    """Sums by operation; `linear` is told apart by its weight, as in `linear 896x4864` (out x in). `log_prob` holds
    its head's linear, which counts by itself too. One thread adds to it, the one that runs the kernels."""

    operations: dict[str, OperationTime] = field(default_factory=dict)

    def add(self, operation: str, seconds: float) -> None:
        """Counts one call."""
        before = self.operations.get(operation, OperationTime())
        self.operations[operation] = OperationTime(before.seconds + seconds, before.num_calls + 1)

    def take(self) -> dict[str, OperationTime]:
        """The sums since the last `take`, the longest first; counting starts anew. For when no kernel is running."""
        taken, self.operations = self.operations, {}
        return dict(sorted(taken.items(), key=lambda entry: -entry[1].seconds))


def timed(kernels: KernelSet, times: KernelTimes, clock: Clock) -> KernelSet:
    """The same kernels, each of which adds what it takes to `times` by `clock` (in seconds). Of `linear` the packed
    layer's calls are timed, not the packing. Right for kernels that return when they are done, as on the CPU."""

    def wrap(operation: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = clock()
            try:
                return kernel(*arguments, **options)
            finally:
                times.add(operation, clock() - start)

        return run

    def timed_packed(operation: str, weight: Weight, packed: PackedLinear | PackedBlock) -> _Timed:
        return _Timed(packed, wrap(f"{operation} {weight.shape[0]}x{weight.shape[1]}", packed))

    def pack(weight: Weight, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear:
        return timed_packed("linear", weight, kernels.linear(weight, bias, planes))

    def pack_normed_linear(norm: Norm, weight: Weight, bias: Tensor | None) -> PackedBlock:
        assert kernels.normed_linear is not None
        return timed_packed("normed_linear", weight, kernels.normed_linear(norm, weight, bias))

    def pack_mlp(norm: Norm, gate: Weight, up: Weight, down: Weight, block: int = 1) -> PackedBlock:
        assert kernels.gated_mlp is not None
        return timed_packed("gated_mlp", gate, kernels.gated_mlp(norm, gate, up, down, block))

    run_log_prob = wrap("log_prob", kernels.log_prob)

    def log_prob(hidden: Tensor, head: PackedLinear, targets: Tensor, vocab_size: int) -> Tensor:
        # A native kernel reads the packed head itself.
        scores: Tensor = run_log_prob(hidden, head.packed if isinstance(head, _Timed) else head, targets, vocab_size)
        return scores

    names = [
        entry.name
        for entry in fields(kernels)
        if entry.name not in ("linear", "log_prob", "normed_linear", "gated_mlp")
    ]
    wrapped = {name: wrap(name, getattr(kernels, name)) for name in names}
    return replace(
        kernels,
        linear=pack,
        log_prob=log_prob,
        normed_linear=None if kernels.normed_linear is None else pack_normed_linear,
        gated_mlp=None if kernels.gated_mlp is None else pack_mlp,
        **wrapped,
    )


@dataclass(frozen=True)
class _Timed:
    """A packed layer or block whose calls are timed."""

    packed: PackedLinear | PackedBlock
    run: Callable[..., Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.packed.num_bytes

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As the packed one's own; only a layer takes a residual."""
        return self.run(x) if residual is None else self.run(x, residual)
