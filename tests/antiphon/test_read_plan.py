"""What `antiphon plan` foretells is what an engine then does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon import Document, Engine, EngineOptions, ParSerOptions
from antiphon.cli.app import main
from antiphon.engine.errors import CapacityError
from antiphon.methods.prompts import ParSerPrompts
from antiphon.read_plan import ReadPlan, plan_read

MIB = 1 << 20
TEXT = "\n\n".join(f"Paragraph {number}: the keeper of light {number} was called Ada {number}." for number in range(40))
PARSER = ParSerOptions(shard_tokens=300)


def options(model: Path, **changes: Any) -> EngineOptions:
    values: dict[str, Any] = {"worker": str(model), "driver": str(model), "memory_bytes": 400 * MIB, "dtype": "float32"}
    return EngineOptions(**{**values, **changes})


def plan(engine: EngineOptions) -> ReadPlan:
    return plan_read(Document.from_text(TEXT), engine, PARSER)


def test_it_reckons_with_the_very_shards_and_bytes_of_an_engine(tiny_model: Path) -> None:
    made = plan(options(tiny_model))

    async def work() -> None:
        async with Engine(options(tiny_model)) as engine:
            corpus = await engine.register(
                Document.from_text(TEXT),
                shard_tokens=PARSER.shard_tokens,
                worker_instructions=ParSerPrompts().worker_instructions,
            )
            assert made.shards == len(corpus.shards)
            assert made.document_tokens == corpus.document_tokens
            assert {name: size for name, size in made.ledger.items() if name != "free"} == (
                engine.assembly.ledger.entries
            )
            store = engine.worker.client.lane.store
            held = store.pool.num_pages - store.pool.num_free
            parents = 2 * -(-made.instruction_tokens // 64)  # of the instructions and the prefix without a shard
            page_bytes = engine.worker.pool_bytes // store.pool.num_pages
            assert abs(held * page_bytes - made.state_bytes) <= parents * page_bytes
            await corpus.release()

    asyncio.run(asyncio.wait_for(work(), 120))
    assert (made.waves, made.read_again_shards) == (1, 0)
    assert made.places[0].place == "pool" and made.places[0].shards == made.shards
    assert made.least_read_seconds > 0 and made.least_round_seconds > 0


def test_what_does_not_fit_goes_down_the_places_and_in_waves(tiny_model: Path) -> None:
    whole = plan(options(tiny_model))
    fixed = sum(size for name, size in whole.ledger.items() if name not in ("worker KV pool", "free"))
    shard_bytes = whole.state_bytes // whole.shards
    third = fixed + whole.state_bytes // 3 + 4 * shard_bytes
    small = plan(options(tiny_model, memory_bytes=third, disk_memory_bytes=2 * shard_bytes))
    assert 1 < small.waves < whole.shards
    pool, disk = small.places
    assert (pool.place, disk.place) == ("pool", "disk")
    assert 1 <= disk.shards <= 2
    assert pool.shards + disk.shards + small.read_again_shards == whole.shards
    assert small.read_again_shards > 0
    roomy = plan(options(tiny_model, memory_bytes=third, disk_memory_bytes=1 << 30))
    assert roomy.read_again_shards == 0


def test_what_can_never_fit_is_refused_as_the_engine_would(tiny_model: Path) -> None:
    with pytest.raises(CapacityError, match="Raise --memory"):
        plan(options(tiny_model, memory_bytes=MIB))


def test_the_command_line_shows_it(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    asked = ["plan", str(book), "--worker", str(tiny_model), "--driver", str(tiny_model), "--memory", "400MiB"]
    assert main([*asked, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["shards"] > 1
    assert sum(made["ledger"].values()) == 400 * MIB
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert f"{made['shards']} shards behind" in shown
    assert "worker KV pool" in shown and "a round goes in 1 wave\n" in shown
    assert main(["plan", str(tmp_path / "none"), *asked[2:]]) == 2
