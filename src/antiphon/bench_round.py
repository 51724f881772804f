"""The round by itself: shards are read once, then every round sends a new suffix to all of them. Floors beside it."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.document import Document
from antiphon.engine.config import ModelConfig
from antiphon.engine.errors import InputError
from antiphon.engine.models.decoder import matrix_bytes
from antiphon.engine.pages import KVCache
from antiphon.engine.sampling_params import SamplingParams
from antiphon.engine.tokenizer import Tokenizer
from antiphon.kernels.timing import KernelTimes, OperationTime, timed
from antiphon.loaded_model import LoadedModel
from antiphon.machine import MachineRates, measure_rates
from antiphon.precision import Precision
from antiphon.scheduler.round import RoundResult

DEFAULT_MODEL = "qwen2.5-coder-0.5b"
_INSTRUCTION_TOKENS = 57
_INSTRUCTION = (
    "Read the source below and reply only from what stands in it; copy the line that supports the reply. " * 8
)


@dataclass(frozen=True)
class BenchRoundOptions:
    """The work of one benchmark: `num_shards` prefixes of `shard_tokens` each, one suffix a round, all rows greedy."""

    model: str = DEFAULT_MODEL
    num_shards: int = 16
    shard_tokens: int = 1024
    suffix_tokens: int = 64
    new_tokens: int = 32
    num_rounds: int = 3
    threads: int | None = None
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    text: Path | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("shards", self.num_shards, 1),
            ("shard-tokens", self.shard_tokens, _INSTRUCTION_TOKENS + 1),
            ("suffix-tokens", self.suffix_tokens, 1),
            ("new-tokens", self.new_tokens, 1),
            ("rounds", self.num_rounds, 1),
        ):
            if value < least:
                raise InputError(f"bench round: {name} is {value}, it must be at least {least}")


@dataclass(frozen=True)
class BenchRound:
    """What one round took. The first one holds the reading of all shards; `cached_tokens` were kept from before it.

    A row's first token comes with its prefill, so the decode rate is that of the others.
    """

    seconds: float
    prefill_seconds: float
    prefill_tokens: int
    prefill_tokens_per_second: float
    cached_tokens: int
    decode_seconds: float
    decode_tokens: int
    decode_tokens_per_second: float


@dataclass(frozen=True)
class RoundFloor:
    """The least that a round's work can take on this machine, in seconds, and the work itself."""

    seconds: float
    prefill_flops: float
    prefill_seconds: float
    decode_bytes: float
    decode_seconds: float


@dataclass(frozen=True)
class BenchFloor:
    """Both measured rates and each round's floor."""

    matrix_flops_per_second: float
    bandwidth_bytes_per_second: float
    rounds: tuple[RoundFloor, ...]


@dataclass(frozen=True)
class BenchProfile:
    """What each operation took, the longest first: while all shards were read, and in all rounds, whose suffixes are
    a small part beside their decode steps. `*_seconds` are the wall times that these are parts of."""

    read: dict[str, OperationTime]
    read_seconds: float
    rounds: dict[str, OperationTime]
    rounds_seconds: float


@dataclass(frozen=True)
class BenchRoundResult:
    """The outcome of `bench_round`. `peak_bytes` is the process's peak resident memory, before rates were measured;
    `profile` is there if it was asked for."""

    model: str
    dtype: str
    threads: int
    rounds: tuple[BenchRound, ...]
    peak_bytes: int
    floor: BenchFloor
    profile: BenchProfile | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dumps`."""
        return asdict(self)


async def bench_round(options: BenchRoundOptions) -> BenchRoundResult:
    """Load the model, run the rounds, then measure the machine. Raises `InputError` where the text is too short."""
    engine_options = EngineOptions(
        worker=options.model,
        threads=options.threads,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    times = KernelTimes()
    wrap = partial(timed, times=times, clock=time.perf_counter) if options.profile else None
    async with Engine(engine_options, worker_only=True, wrap_kernels=wrap) as engine:
        worker = engine.worker
        rounds, profile = await _run_rounds(worker, take_tokens(worker.tokenizer, options), options, times)
        config, threads, peak = worker.config, torch.get_num_threads(), peak_resident_bytes()
    # After the engine is gone and the peak is taken: measuring needs a gigabyte of its own.
    precision = engine_options.precision
    rates = measure_rates(precision.weights)
    floors = tuple(round_floor(config, rates, precision, options, first=index == 0) for index in range(len(rounds)))
    floor = BenchFloor(rates.matrix_flops_per_second, rates.bandwidth_bytes_per_second, floors)
    return BenchRoundResult(options.model, str(precision), threads, tuple(rounds), peak, floor, profile)


@dataclass(frozen=True)
class BenchTokens:
    """Whole prefixes, all with the same instruction, and one suffix a round; no piece of text comes twice."""

    prefixes: tuple[list[int], ...]
    suffixes: tuple[list[int], ...]


def take_tokens(tokenizer: Tokenizer, options: BenchRoundOptions) -> BenchTokens:
    """Cut prefixes and suffixes of the exact lengths asked out of the text's tokens, without using any twice."""
    body = options.shard_tokens - _INSTRUCTION_TOKENS
    needed = options.num_shards * body + options.num_rounds * options.suffix_tokens
    tokens: list[int] = []
    for text in _texts(options.text):
        tokens.extend(tokenizer.encode(text))
        if len(tokens) >= needed:
            break
    if len(tokens) < needed:
        raise InputError(
            f"bench round: {needed} tokens of text are needed, {options.text or 'the standard library'} has "
            f"{len(tokens)}: give a longer --text, fewer --shards or a smaller --shard-tokens"
        )
    instruction = tokenizer.encode(_INSTRUCTION)[:_INSTRUCTION_TOKENS]
    shards = options.num_shards * body
    prefixes = tuple(instruction + tokens[start : start + body] for start in range(0, shards, body))
    step = options.suffix_tokens
    suffixes = tuple(tokens[start : start + step] for start in range(shards, needed, step))
    return BenchTokens(prefixes, suffixes)


def sample_document(tokenizer: Tokenizer, num_shards: int, shard_tokens: int) -> Document:
    """Python's own source, about as many tokens of it as these shards have."""
    work = BenchRoundOptions(num_shards=num_shards, shard_tokens=shard_tokens, num_rounds=1)
    tokens = [token for prefix in take_tokens(tokenizer, work).prefixes for token in prefix]
    return Document.from_text(tokenizer.decode(tokens))


def round_floor(
    config: ModelConfig, rates: MachineRates, precision: Precision, options: BenchRoundOptions, *, first: bool
) -> RoundFloor:
    """FLOPs over the matrix rate and bytes over the bandwidth, whichever is longer, for each pass of one round.

    A token costs 2 FLOPs a parameter, and 4 x heads x head size x layers for each position it attends to (scores and
    values). The head is counted once a row and pass. A decode step reads all weights and the live rows' KV once, in
    the bytes that they are stored in, scales included.
    """
    rows, prefix, suffix = options.num_shards, options.shard_tokens, options.suffix_tokens
    per_position = 4 * config.num_heads * config.head_dim * config.num_layers
    parameters = config.num_linear_parameters + config.num_head_parameters
    weight_bytes, kv_token_bytes = matrix_bytes(config, precision.weights), KVCache.token_bytes(config, precision.kv)
    read = prefix if first else 0
    attended = read * (read + 1) // 2 + suffix * prefix + suffix * (suffix + 1) // 2
    flops = rows * (2 * config.num_linear_parameters * (read + suffix) + 2 * config.num_head_parameters)
    flops += rows * per_position * attended
    prefill_seconds = _floor_seconds(flops, weight_bytes, rates)
    decode_bytes, decode_seconds = 0, 0.0
    # The prefill already gives the first new token, so a pass fewer than there are new tokens.
    for context in range(prefix + suffix + 1, prefix + suffix + options.new_tokens):
        step_flops = rows * (2 * parameters + per_position * context)
        step_bytes = weight_bytes + rows * context * kv_token_bytes
        decode_bytes += step_bytes
        decode_seconds += _floor_seconds(step_flops, step_bytes, rates)
    return RoundFloor(prefill_seconds + decode_seconds, flops, prefill_seconds, decode_bytes, decode_seconds)


def peak_resident_bytes() -> int:
    """The most memory that this process ever had resident."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


async def _run_rounds(
    worker: LoadedModel, tokens: BenchTokens, options: BenchRoundOptions, times: KernelTimes
) -> tuple[list[BenchRound], BenchProfile | None]:
    start = time.perf_counter()
    prefixes = await asyncio.gather(*(worker.read(token_ids) for token_ids in tokens.prefixes))
    read_seconds, read_times = time.perf_counter() - start, times.take()
    sampling = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True)
    results = [await worker.round(prefixes, [suffix], sampling) for suffix in tokens.suffixes]
    profile = BenchProfile(read_times, read_seconds, times.take(), sum(result.seconds for result in results))
    worker.release(prefixes)
    read_tokens = sum(map(len, tokens.prefixes))
    rounds = [
        _bench_round(result, *((read_seconds, read_tokens) if index == 0 else (0.0, 0)))
        for index, result in enumerate(results)
    ]
    return rounds, profile if options.profile else None


def _bench_round(result: RoundResult, read_seconds: float, read_tokens: int) -> BenchRound:
    prefill_tokens = result.prefill_tokens + read_tokens
    prefill_seconds = result.prefill_seconds + read_seconds
    num_first_tokens = len(result.replies)
    return BenchRound(
        seconds=result.seconds + read_seconds,
        prefill_seconds=prefill_seconds,
        prefill_tokens=prefill_tokens,
        prefill_tokens_per_second=_rate(prefill_tokens, prefill_seconds),
        # What the first round has read itself was not kept from before.
        cached_tokens=result.cached_tokens - read_tokens,
        decode_seconds=result.decode_seconds,
        decode_tokens=result.decode_tokens,
        decode_tokens_per_second=_rate(result.decode_tokens - num_first_tokens, result.decode_seconds),
    )


def _texts(path: Path | None) -> Iterator[str]:
    sources: Sequence[Path] = (path,) if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for source in sources:
        try:
            yield source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if path:
                raise InputError(f"bench round: cannot read {path}: {error}") from error


def _floor_seconds(flops: float, num_bytes: float, rates: MachineRates) -> float:
    return max(flops / rates.matrix_flops_per_second, num_bytes / rates.bandwidth_bytes_per_second)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
