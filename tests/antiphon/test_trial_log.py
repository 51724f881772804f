"""The log of trials: nothing lost by a kill at any byte, nothing twice, nothing mixed; and the trials that fill it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.api import Engine
from antiphon.assembly import EngineOptions
from antiphon.document import Document
from antiphon.engine.errors import InputError
from antiphon.engine.sampling_params import SamplingParams
from antiphon.evaluation.configurations import FULL_CONTEXT
from antiphon.evaluation.qa_data import QaDocument, Question
from antiphon.evaluation.trial_log import TrialLog, read_rows
from antiphon.evaluation.trials import RecordingCorpus, gold_shards, run_trial
from antiphon.methods.backend import ScatterOptions, WorkerReply
from antiphon.methods.options import ParSerOptions
from antiphon.methods.parser import ParSer

SETTINGS = {"paragraphs": 50, "data": ("hotpotqa", "dev")}
ROWS: list[dict[str, Any]] = [
    {"configuration": "default", "question_id": "q1", "prediction": "Sonic"},
    {"configuration": "gate=both", "question_id": "q1", "prediction": "Kınar\nnew line"},
    {"configuration": "default", "question_id": "q2", "prediction": "", "trajectory": {"events": [{"turn": 1}]}},
]


def _filled(path: Path) -> TrialLog:
    log = TrialLog(path, SETTINGS)
    for row in ROWS:
        log.append(row)
    return log


def _without_settings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "settings"} for row in rows]


def test_what_was_appended_is_there_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trials.jsonl"
    first = _filled(path)
    again = TrialLog(path, SETTINGS)
    assert again.rows == first.rows == read_rows(path)
    assert _without_settings(again.rows) == ROWS
    assert again.has("default", "q2") and not again.has("gate=both", "q2")


def test_each_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    log = TrialLog(path, SETTINGS)
    for count, row in enumerate(ROWS, start=1):
        log.append(row)
        assert path.read_bytes().count(b"\n") == count == len(read_rows(path))


def test_a_run_killed_at_any_byte_of_the_last_row_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    whole_path = tmp_path / "whole.jsonl"
    _filled(whole_path)
    whole = whole_path.read_bytes()
    start_of_last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path = tmp_path / "torn.jsonl"
    for length in range(start_of_last, len(whole)):
        path.write_bytes(whole[:length])
        assert len(read_rows(path)) == 2
        log = TrialLog(path, SETTINGS)
        assert not log.has("default", "q2")
        log.append(ROWS[2])
        assert path.read_bytes() == whole


def test_a_run_killed_in_its_first_row_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_bytes(b'{"configuration": "def')
    assert TrialLog(path, SETTINGS).rows == []
    assert path.read_bytes() == b""


def test_reading_alone_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    _filled(path)
    torn = path.read_bytes()[:-5]
    path.write_bytes(torn)
    read_rows(path)
    assert path.read_bytes() == torn


@pytest.mark.parametrize("line", [b"{torn", b'"text"', b"{}", b"\xff\xfe", b""])
def test_damage_before_the_last_line_is_refused_and_left_alone(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trials.jsonl"
    _filled(path)
    damaged = line + b"\n" + path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="line 1"):
        TrialLog(path, SETTINGS)
    assert path.read_bytes() == damaged


def test_a_trial_is_never_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    log = _filled(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="already"):
        log.append(ROWS[0])
    assert path.read_bytes() == before
    path.write_bytes(before + before)
    with pytest.raises(InputError, match="repeats"):
        TrialLog(path, SETTINGS)


def test_rows_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    _filled(path)
    with pytest.raises(InputError, match=r"\(paragraphs 50, now 100\).*--out"):
        TrialLog(path, {**SETTINGS, "paragraphs": 100})


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    scores = {"relevance": [[float("nan"), -1.5], (float("inf"),)]}
    TrialLog(path, SETTINGS).append({**ROWS[0], **scores})
    assert json.loads(path.read_text())["relevance"] == [[None, -1.5], [None]]


def test_a_row_that_cannot_be_written_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    log = TrialLog(path, SETTINGS)
    log.append(ROWS[0])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        log.append({**ROWS[1], "trajectory": object()})
    assert path.read_bytes() == before and not log.has("gate=both", "q1")


def test_a_missing_log_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        read_rows(tmp_path / "absent.jsonl")


QUESTION = Question("q1", "hotpotqa", "bridge", "Who sang?", ("Jim",), gold=(1,), own=(1, 2))
PIECES = ("Document 1:\nSong\nJim sang it.", "Document 2:\nTown\n" + "A town by the sea. " * 6)
DOCUMENT = QaDocument("\n\n".join(PIECES), (1, 2), ((0, len(PIECES[0])), (len(PIECES[0]) + 2, 10_000)))


def _options(model: Path) -> EngineOptions:
    return EngineOptions(worker=str(model), driver=str(model), dtype="float32", threads=1, memory_bytes=1 << 29)


def test_a_recorded_round_is_the_round_with_every_rows_relevance_and_every_kept_reply(tiny_model: Path) -> None:
    options = ScatterOptions(SamplingParams(max_new_tokens=4), grammar="none", gate="likelihood", readers=1)

    async def run() -> tuple[RecordingCorpus, list[WorkerReply], list[WorkerReply], list[frozenset[int]]]:
        async with Engine(_options(tiny_model), worker_only=True) as engine:
            parser = ParSer(engine, ParSerOptions(shard_tokens=40))
            corpus = await parser.register(Document.from_text(DOCUMENT.text))
            recording, seen = RecordingCorpus(corpus), list[WorkerReply]()
            round_ = await recording.scatter(["Who?", "Where?"], options, seen.append)
            gold = gold_shards(DOCUMENT, QUESTION, corpus)
            await recording.release()
            return recording, seen, list(round_.replies), gold

    recording, seen, replies, gold = asyncio.run(run())
    (record,) = recording.scatters
    assert record["queries"] == ["Who?", "Where?"] and record["readers"] == 1
    assert gold == [frozenset({0})]
    assert len(replies) == 2 * len(recording.shards) and {reply.shard for reply in replies} == set(
        range(len(recording.shards))
    )
    for reply in replies:
        assert record["relevance"][reply.query][reply.shard] == reply.relevance is not None
    assert [len(shards) for shards in record["ungated"]] == [1, 1]
    kept = [(reply.shard, reply.query, reply.text) for reply in replies if not reply.abstained]
    assert [(reply["shard"], reply["query"], reply["text"]) for reply in record["replies"]] == kept
    assert len(kept) == 2 and len(seen) == len(replies)


def test_a_full_context_trial_reads_the_document_once_and_one_that_cannot_fit_is_a_row_too(tiny_model: Path) -> None:
    long = QaDocument(DOCUMENT.text * 200, (1, 2), DOCUMENT.spans)

    async def run() -> list[dict[str, Any]]:
        async with Engine(_options(tiny_model), worker_only=True) as engine:
            return [await run_trial(engine, None, document, QUESTION, FULL_CONTEXT) for document in (DOCUMENT, long)]

    fits, too_long = asyncio.run(run())
    assert fits["configuration"] == "full-context" and fits["answers"] == ["Jim"] and "error" not in fits
    assert fits["usage"]["driver_prefill_tokens"] > len(DOCUMENT.text) and fits["usage"]["driver_decode_tokens"] <= 64
    assert fits["seconds"]["total"] >= fits["seconds"]["driver"] > 0 == fits["seconds"]["read"]
    assert too_long["prediction"] == "" and too_long["error"].startswith("CapacityError")
    assert json.dumps([fits, too_long])
