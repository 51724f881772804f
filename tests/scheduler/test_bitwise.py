"""Same bits, whatever the load: logits of every step, tokens and scores, equal bit for bit, on the native kernels.

Cold = warm, alone = in a crowd, any order, any step size (read in pieces = read whole), any wave,
any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import tiny_models as tiny
import torch
from tiny_models import TinyEngine, prompt
from tiny_rows import read, suffix_row
from torch import Tensor
from transformers import PreTrainedModel

from antiphon.engine.sampler import Sampled
from antiphon.engine.sampling_params import SamplingParams
from antiphon.kernels import native
from antiphon.kernels.ops import ONE_PLANE, KernelSet, PackedLinear, Planes
from antiphon.scheduler.lane import Lane
from antiphon.scheduler.row import Row

HEADS = [prompt(length) for length in (1, 63, 64, 65, 130)]
TAILS = [prompt(length, seed=1) for length in (2, 5, 64)]
PAIRS = [(head, tail) for head in range(len(HEADS)) for tail in range(len(TAILS))]
PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)
# Weights and KV: exact, as users run them by default, and narrow.
PRECISIONS = {
    "float32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.bfloat16),
    "int8-kv8": (torch.int8, torch.int8),
}


@dataclass(frozen=True)
class Bits:
    """What a row left: the logits of each of its steps, its tokens, and its query's scores."""

    logits: list[Tensor]
    tokens: tuple[int, ...]
    scores: list[float]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bits) or len(self.logits) != len(other.logits):
            return False
        same_logits = all(torch.equal(mine, theirs) for mine, theirs in zip(self.logits, other.logits, strict=True))
        return same_logits and self.tokens == other.tokens and self.scores == other.scores


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Tensor]]:
    """The logits that rows were sampled from, by the row's id, as they come."""
    found: dict[int, list[Tensor]] = {}
    take = Lane._take_sampled

    def record(lane: Lane, row: Row, sampled: Sampled, logits: Tensor) -> None:
        found.setdefault(id(row), []).append(logits.clone())
        take(lane, row, sampled, logits)

    monkeypatch.setattr(Lane, "_take_sampled", record)
    return found


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> dict[str, torch.dtype]:
    assert native.available() is None, native.available()
    weights, kv = PRECISIONS[request.param]
    return {"weight_dtype": weights, "kv_dtype": kv}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


def run(engine: TinyEngine, steps: dict[int, list[Tensor]], rows: list[Row]) -> list[Bits]:
    steps.clear()
    engine.run(rows)
    return [Bits(steps[id(row)], row.future.result().new_token_ids, list(row.scores)) for row in rows]


def scored(head: int, tail: int) -> dict[str, int]:
    """The tail but its first token, whose logits belong to the prefix."""
    start = len(HEADS[head])
    return {"score_start": start + 1, "score_stop": start + len(TAILS[tail])}


def cold_row(head: int, tail: int) -> Row:
    ids = [*HEADS[head], *TAILS[tail]]
    return suffix_row(ids, params=PARAMS, **scored(head, tail))


def warm_rows(engine: TinyEngine, pairs: list[tuple[int, int]]) -> list[Row]:
    prefixes = read(engine, *HEADS)
    return [suffix_row(TAILS[tail], prefixes[head], PARAMS, **scored(head, tail)) for head, tail in pairs]


def cold_alone(model: PreTrainedModel, steps: dict[int, list[Tensor]], **parts: object) -> list[Bits]:
    """Every pair by itself, in an engine of its own, on one thread."""
    native.set_num_threads(1)
    return [run(tiny.tiny_engine(model, **parts), steps, [cold_row(*pair)])[0] for pair in PAIRS]  # type: ignore[arg-type]


def test_warm_rows_in_a_crowd_have_the_bits_of_cold_ones_alone(
    model: PreTrainedModel, precision: dict[str, torch.dtype], steps: dict[int, list[Tensor]]
) -> None:
    cold = dict(zip(PAIRS, cold_alone(model, steps, **precision), strict=True))
    assert all(len(bits.logits) == PARAMS.max_new_tokens for bits in cold.values())
    for num_threads, order in ((1, PAIRS), (2, PAIRS[::-1]), (3, PAIRS[::2] + PAIRS[1::2])):
        native.set_num_threads(num_threads)
        engine = tiny.tiny_engine(model, **precision)  # type: ignore[arg-type]
        assert run(engine, steps, warm_rows(engine, order)) == [cold[pair] for pair in order]


@pytest.mark.parametrize(("step_tokens", "num_pages"), [(7, 64), (64, 64), (4096, 64), (96, 5), (4096, 9)])
def test_pieces_and_waves_of_any_size_have_the_bits_of_the_whole(
    model: PreTrainedModel,
    precision: dict[str, torch.dtype],
    steps: dict[int, list[Tensor]],
    step_tokens: int,
    num_pages: int,
) -> None:
    """Few pages make few rows fit at once, so they go in waves; small steps cut every prompt in pieces."""
    cold = cold_alone(model, steps, **precision)
    native.set_num_threads(2)
    engine = tiny.tiny_engine(model, step_tokens=step_tokens, num_pages=num_pages, **precision)  # type: ignore[arg-type]
    assert run(engine, steps, [cold_row(*pair) for pair in PAIRS]) == cold


def test_an_order_of_summation_that_looks_at_the_batch_is_seen(
    model: PreTrainedModel, steps: dict[int, list[Tensor]]
) -> None:
    """The negative control: tokens stay equal, but the comparison of bits fails."""
    parts = {"wrap_kernels": _with_batch_dependent_sums}
    cold = cold_alone(model, steps, **parts)
    engine = tiny.tiny_engine(model, **parts)  # type: ignore[arg-type]
    warm = run(engine, steps, warm_rows(engine, PAIRS))
    assert [bits.tokens for bits in warm] == [bits.tokens for bits in cold]
    assert warm != cold


@dataclass(frozen=True)
class _BatchDependentLinear:
    """Sums k in two halves where a call has many rows, as libraries do that choose a kernel by the number of rows."""

    whole: PackedLinear
    halves: tuple[PackedLinear, PackedLinear]
    num_k: int

    @property
    def num_bytes(self) -> int:
        return self.whole.num_bytes

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.shape[0] < 8:
            return self.whole(x, residual)
        first, second = (part.contiguous() for part in x.split([self.num_k // 2, self.num_k - self.num_k // 2], dim=-1))
        return self.halves[1](second, self.halves[0](first, residual))


def _with_batch_dependent_sums(kernels: KernelSet) -> KernelSet:
    def pack(weight: Tensor, bias: Tensor | None, planes: Planes = ONE_PLANE) -> PackedLinear:
        num_k = weight.shape[1]
        first, second = weight[:, : num_k // 2].contiguous(), weight[:, num_k // 2 :].contiguous()
        halves = (kernels.linear(first, bias), kernels.linear(second, None))
        return _BatchDependentLinear(kernels.linear(weight, bias), halves, num_k)

    # The native log-probability reads the packed head itself, so the head's rows go through the reference here.
    return replace(kernels, linear=pack, log_prob=_reference_log_prob)


def _reference_log_prob(hidden: Tensor, head: PackedLinear, targets: Tensor, vocab_size: int) -> Tensor:
    log_probs = torch.log_softmax(head(hidden)[:, :vocab_size], dim=-1)
    return log_probs.gather(1, targets[:, None]).squeeze(1)
