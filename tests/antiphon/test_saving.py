"""Read once for ever: a saved corpus is asked with no reading and the same bits; what changed alone is read again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from antiphon import Document, Engine, EngineOptions, ParSerOptions
from antiphon.api import ask_async
from antiphon.cli.app import main
from antiphon.corpus import Corpus
from antiphon.document import Source
from antiphon.engine.cache_folder import corpora_folder
from antiphon.engine.errors import InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.engine.tiers import TierError
from antiphon.methods.backend import ScatterOptions
from antiphon.saving import read_and_save, saved_corpus
from antiphon.scheduler.residency import Residency

MIB = 1 << 20
PARAGRAPHS = [f"Paragraph {number}: the keeper of light {number} was called Ada {number}." for number in range(12)]
SHARDS = ParSerOptions(shard_tokens=120, rounds=1, driver_max_new_tokens=40, worker_max_new_tokens=12)
HOW = ScatterOptions(SamplingParams(max_new_tokens=12), gate="likelihood", readers=3, grammar="none")


@pytest.fixture(autouse=True)
def fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model reads a tiny shard sooner than any file is opened: the choice has a test of its own."""
    monkeypatch.setattr(Residency, "_reading_is_cheaper", lambda residency, prefix: False)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path / "cache"))


def options(model: Path, **changes: Any) -> EngineOptions:
    values: dict[str, Any] = {"worker": str(model), "driver": str(model), "memory_bytes": 400 * MIB, "dtype": "float32"}
    return EngineOptions(**{**values, **changes}, debug=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def document(paragraphs: list[str] = PARAGRAPHS) -> Document:
    """Each paragraph is a source, so that a change in one moves no other shard."""
    return Document(tuple(Source(f"{number}.txt", text) for number, text in enumerate(paragraphs)))


async def saved(engine: Engine, paragraphs: list[str] = PARAGRAPHS) -> Corpus:
    return await read_and_save(document(paragraphs), "lights", engine, SHARDS)


async def replies(corpus: Corpus) -> list[tuple[str, float | None]]:
    done = await corpus.scatter(["Who kept light 3?"], HOW)
    return [(reply.text, reply.relevance) for reply in done.replies]


def state_files() -> list[Path]:
    return sorted(corpora_folder().rglob("*.safetensors"))


def test_a_saved_corpus_is_asked_with_no_reading_and_the_same_bits(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(options(tiny_model)) as engine:
            corpus = await saved(engine)
            assert corpus.prefill_tokens > corpus.document_tokens
            expected = await replies(corpus)
        assert len({reply for reply, _ in expected}) > 1
        assert len(state_files()) == len(corpus.shards)
        async with Engine(options(tiny_model)) as engine:
            again = await saved(engine)
            # The instructions, and the prefix without a shard, against which likelihoods are read, are no shards.
            assert again.prefill_tokens == corpus.prefill_tokens - corpus.document_tokens
            assert await replies(again) == expected
            counters = engine.counters()["worker"]
            assert counters["shards_fetched"] == len(corpus.shards)
            assert counters["shards_read_again"] == counters["tier_failures"] == 0

    run(work())


def test_a_changed_document_has_its_changed_shards_read_alone(tiny_model: Path) -> None:
    changed = [*PARAGRAPHS[:5], PARAGRAPHS[5].replace("Ada", "Bob"), *PARAGRAPHS[6:]]

    async def work() -> None:
        async with Engine(options(tiny_model)) as engine:
            first = await saved(engine)
        async with Engine(options(tiny_model)) as engine:
            second = await saved(engine, changed)
        overhead = first.prefill_tokens - first.document_tokens
        changed_shards = [shard for shard in second.shards if shard.source == 5]
        lengths = [
            second.prefixes[shard.index].num_tokens - second.prefixes[shard.index].parent.num_tokens  # type: ignore[union-attr]
            for shard in changed_shards
        ]
        assert second.prefill_tokens == overhead + sum(lengths)
        # What only the old one had is gone.
        assert len(state_files()) == len(second.shards)

    run(work())


def test_a_reading_that_was_cut_goes_on_where_it_was(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(options(tiny_model)) as engine:
            whole = await saved(engine)
        for path in state_files()[::2]:  # as if the process had been killed before these were written
            path.unlink()
        left = len(state_files())
        async with Engine(options(tiny_model)) as engine:
            again = await saved(engine)
        assert whole.prefill_tokens - whole.document_tokens < again.prefill_tokens < whole.prefill_tokens
        assert len(state_files()) == len(whole.shards) > left

    run(work())


def test_damage_is_seen_and_read_again_with_the_same_bits(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(options(tiny_model)) as engine:
            expected = await replies(await saved(engine))
        damaged = state_files()[3]
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        state_files()[5].write_bytes(b"")
        async with Engine(options(tiny_model)) as engine:
            corpus = await engine.register(
                document(), shard_tokens=120, worker_instructions=corpus_instructions(), on_event=lambda event: None
            )
            assert await replies(corpus) == expected
            counters = engine.counters()["worker"]
            assert counters["tier_failures"] == counters["shards_read_again"] == 2

    run(work())


def corpus_instructions() -> str:
    found = saved_corpus(["@lights"])
    assert found is not None
    return found.worker_instructions


def test_a_corpus_of_another_precision_is_read_again_and_the_answer_says_so(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(options(tiny_model)) as engine:
            await saved(engine)
        same = await ask_async("@lights", "Who kept light 3?", engine=options(tiny_model), options=SHARDS)
        assert not any("read again" in note for note in same.notes)
        assert same.usage.document_tokens > 0
        other = options(tiny_model, kv_cache_dtype="bf16")
        answer = await ask_async("@lights", "Who kept light 3?", engine=other, options=SHARDS)
        assert any("read again" in note and "KV in bfloat16" in note for note in answer.notes)
        assert answer.usage.worker_prefill_tokens > same.usage.worker_prefill_tokens

    run(work())


def test_a_disk_without_room_ends_the_saving_and_keeps_what_is_saved(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(options(tiny_model, disk_memory_bytes=400_000)) as engine:
            with pytest.raises(TierError, match="--disk-memory"):
                await saved(engine)
            engine.worker.client.core.call(engine.worker.client.core.check_integrity).result(60)
        assert 0 < len(state_files()) < len(PARAGRAPHS)
        with pytest.raises(InputError, match="no saved corpus 'lights'"):
            saved_corpus(["@lights"])

    run(work())


def test_a_bad_name_fails_before_anything_is_read(tiny_model: Path) -> None:
    async def work() -> None:
        async with Engine(options(tiny_model)) as engine:
            with pytest.raises(InputError, match="corpus name"):
                await read_and_save(document(), "../lights", engine, SHARDS)
            assert engine.worker.client.lane.num_steps == 0

    run(work())


def test_the_command_line_reads_lists_and_asks(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(PARAGRAPHS))
    machine = ("--worker", str(tiny_model), "--memory", "400MiB")
    few = ("--driver", str(tiny_model), "--rounds", "1", "--max-new-tokens", "4")
    assert main(["read", str(book), "--save", "book", "--shard-tokens", "120", "--quiet", *machine]) == 0
    first = capsys.readouterr().out
    assert main(["read", str(book), "--save", "book", "--shard-tokens", "120", "--quiet", *machine]) == 0
    again = capsys.readouterr().out
    assert first.split()[1] == again.split()[1]
    assert int(first.split(" tokens, ")[1].split()[0].replace(",", "")) > int(
        again.split(" tokens, ")[1].split()[0].replace(",", "")
    )
    book.unlink()
    assert main(["ask", "@book", "Who kept light 3?", "--quiet", *machine, *few]) in (0, 1)
    capsys.readouterr()
    for wrong, says in (
        (["ask", "@book", str(tiny_model), "Who?"], "ask it alone"),
        (["ask", "@book", "Who?", "--shard-tokens", "99", *machine], "leave the flag away"),
        (["ask", "@other", "Who?"], "saved are: book"),
        (["read", str(tmp_path / "none.txt"), "--save", "book"], "none.txt"),
        (["read", str(tiny_model / "config.json"), "--save", "a/b"], "corpus name"),
    ):
        assert main(wrong) == 2
        assert says in " ".join(capsys.readouterr().err.split())
