"""What reading a document and asking it would take: bytes by holder, what fits where, waves, and the least seconds.

Nothing of it is allocated: models are looked at, not loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from antiphon.assembly import EngineOptions, divide_memory, set_threads
from antiphon.bench_round import BenchRoundOptions, round_floor
from antiphon.document import Document
from antiphon.engine.chat import ChatFormat
from antiphon.engine.model_source import ModelSource, resolve_model
from antiphon.engine.pages import PAGE_TOKENS, KVCache, num_pages_for
from antiphon.machine import MachineRates, measure_rates
from antiphon.methods.options import ParSerOptions
from antiphon.methods.prompts import ParSerPrompts
from antiphon.scheduler.residency import spare_pages
from antiphon.tiering import disk_limit

# What a round is reckoned with: a query, and of the reply its first token, which the gate needs.
_QUERY_TOKENS = 64


@dataclass(frozen=True)
class PlaceShare:
    """What of the document's state one place takes: `shards` of it, in `num_bytes` of `limit_bytes`."""

    place: str
    shards: int
    num_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class ReadPlan:
    """`ledger` has every byte of the memory budget by holder. `places` are filled from the fastest on, and
    `read_again_shards`, which fit none, are computed in every round. A round visits the shards in `waves`. Seconds are
    the least that the measured rates allow: for reading, and for a later round whose gate stops every row."""

    worker: str
    driver: str
    precision: str
    document_tokens: int
    shards: int
    instruction_tokens: int
    state_bytes: int
    ledger: dict[str, int]
    places: tuple[PlaceShare, ...]
    read_again_shards: int
    waves: int
    least_read_seconds: float
    least_round_seconds: float
    matrix_flops_per_second: float
    bandwidth_bytes_per_second: float

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dumps`."""
        return asdict(self)


def plan_read(document: Document, engine: EngineOptions, parser: ParSerOptions) -> ReadPlan:
    """Reckons with the tokens of this very document. Raises what an engine would that cannot hold it (`CapacityError`)
    or finds no model (`ModelError`)."""
    set_threads(engine.threads)
    worker = resolve_model(engine.worker, revision=engine.worker_revision)
    driver = resolve_model(engine.driver, revision=engine.driver_revision)
    ledger, memory = divide_memory(engine, worker, driver)
    instruction_tokens, shard_tokens = _count_tokens(document, worker, parser)
    page_bytes = KVCache.page_bytes(worker.config, engine.precision.kv)
    shard_bytes = [_own_pages(instruction_tokens, tokens) * page_bytes for tokens in shard_tokens]
    in_pool = memory.worker_pages - num_pages_for(instruction_tokens)
    if sum(shard_bytes) > in_pool * page_bytes:  # prefixes come and go: some pages stay free for rows
        in_pool -= spare_pages(memory.worker_pages)
    limits = {
        "pool": in_pool * page_bytes,
        "host": engine.host_memory_bytes,
        "disk": disk_limit(engine.disk_memory_bytes),
    }
    places, left = _fill(limits, shard_bytes)
    in_pool_shards = places[0].shards if places else 0
    rates = measure_rates(engine.precision.weights)
    read_seconds, round_seconds = _least_seconds(worker, engine, shard_tokens, rates)
    return ReadPlan(
        worker=worker.name,
        driver=driver.name,
        precision=str(engine.precision),
        document_tokens=sum(shard_tokens),
        shards=len(shard_tokens),
        instruction_tokens=instruction_tokens,
        state_bytes=sum(shard_bytes),
        ledger=dict(ledger.table()),
        places=places,
        read_again_shards=left,
        waves=-(-len(shard_tokens) // max(1, in_pool_shards)),
        least_read_seconds=read_seconds,
        least_round_seconds=round_seconds,
        matrix_flops_per_second=rates.matrix_flops_per_second,
        bandwidth_bytes_per_second=rates.bandwidth_bytes_per_second,
    )


def _count_tokens(document: Document, worker: ModelSource, parser: ParSerOptions) -> tuple[int, list[int]]:
    """Tokens of the instructions and of each shard."""
    tokenizer = worker.tokenizer()
    chat = ChatFormat(tokenizer)
    shards = document.sharded(tokenizer, parser.shard_tokens, parser.shard_overlap)
    instructions = chat.worker_prefix(ParSerPrompts().worker_instructions)
    return len(instructions), [len(chat.shard_tokens(shard.text)) for shard in shards]


def _own_pages(instruction_tokens: int, tokens: int) -> int:
    return num_pages_for(instruction_tokens + tokens) - instruction_tokens // PAGE_TOKENS


def _fill(limits: dict[str, int], shard_bytes: list[int]) -> tuple[tuple[PlaceShare, ...], int]:
    """Shards from the first on into the places in turn; how many fit none."""
    places, index = [], 0
    for place, limit in limits.items():
        first, taken = index, 0
        while index < len(shard_bytes) and taken + shard_bytes[index] <= limit:
            taken += shard_bytes[index]
            index += 1
        if limit > 0:
            places.append(PlaceShare(place, index - first, taken, limit))
    return tuple(places), len(shard_bytes) - index


def _least_seconds(
    worker: ModelSource, engine: EngineOptions, shard_tokens: list[int], rates: MachineRates
) -> tuple[float, float]:
    """Of reading all shards, and of one round over them; shards are taken as equally long."""
    if not shard_tokens:
        return 0.0, 0.0
    work = BenchRoundOptions(
        num_shards=len(shard_tokens),
        shard_tokens=max(64, sum(shard_tokens) // len(shard_tokens)),
        suffix_tokens=_QUERY_TOKENS,
        new_tokens=1,
    )
    first, later = (round_floor(worker.config, rates, engine.precision, work, first=first) for first in (True, False))
    return first.seconds - later.seconds, later.seconds
