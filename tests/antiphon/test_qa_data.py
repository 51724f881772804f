"""Documents of N paragraphs: exact, the same anywhere, without namesakes of the gold paragraphs."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest

from antiphon.document import Document
from antiphon.engine.errors import InputError
from antiphon.evaluation.qa_data import Paragraph, Question, build_document, load_pool, load_questions

QUESTION = Question("q1", "hotpotqa", "bridge", "Who?", ("Jim",), gold=(1, 2), own=(0, 1, 2, 3))
POOL = {i: Paragraph(i, f"Title {i}", f"Text of paragraph {i}.") for i in range(40)}


@pytest.mark.parametrize("num_paragraphs", [4, 5, 20, 40])
def test_a_document_has_exactly_n_paragraphs_with_all_of_the_questions_own(num_paragraphs: int) -> None:
    document = build_document(QUESTION, POOL, num_paragraphs=num_paragraphs)
    assert len(document.paragraph_ids) == len(set(document.paragraph_ids)) == num_paragraphs
    assert set(QUESTION.own) <= set(document.paragraph_ids)
    assert document.text.count("Document ") == num_paragraphs


def test_paragraphs_are_written_as_the_data_says() -> None:
    document = build_document(QUESTION, POOL, num_paragraphs=5)
    expected = [f"Document {n}:\nTitle {i}\nText of paragraph {i}." for n, i in enumerate(document.paragraph_ids, 1)]
    assert document.text == "\n\n".join(expected)


def test_spans_are_the_paragraphs_in_the_text_that_a_document_keeps() -> None:
    pool = {**POOL, 2: Paragraph(2, "Cafe\u0301", "Decomposed.\r\nTwo lines.")}
    document = build_document(QUESTION, pool, num_paragraphs=20)
    kept = Document.from_text(document.text).sources[0].text
    assert kept == document.text
    for paragraph_id in document.paragraph_ids:
        start, end = document.span(paragraph_id)
        title = unicodedata.normalize("NFC", pool[paragraph_id].title)
        assert kept[start:end].startswith("Document ") and kept[start:end].split("\n")[1] == title
    assert document.spans[-1][1] == len(kept)
    with pytest.raises(ValueError):
        document.span(999)


def test_the_same_seed_and_question_give_the_same_document_whatever_the_pools_order() -> None:
    document = build_document(QUESTION, POOL, num_paragraphs=20)
    backwards = dict(reversed(POOL.items()))
    assert build_document(QUESTION, backwards, num_paragraphs=20) == document
    # Written down, so that another Python or machine is held to the same paragraphs.
    assert build_document(QUESTION, POOL, num_paragraphs=8).paragraph_ids == (2, 1, 15, 3, 12, 0, 6, 22)


def test_another_seed_or_question_gives_another_document() -> None:
    ids = build_document(QUESTION, POOL, num_paragraphs=20).paragraph_ids
    other = Question("q2", "hotpotqa", "bridge", "Who?", ("Jim",), gold=(1, 2), own=(0, 1, 2, 3))
    assert set(build_document(QUESTION, POOL, num_paragraphs=20, seed=1).paragraph_ids) != set(ids)
    assert set(build_document(other, POOL, num_paragraphs=20).paragraph_ids) != set(ids)


def test_a_longer_document_holds_all_paragraphs_of_a_shorter_one() -> None:
    short = build_document(QUESTION, POOL, num_paragraphs=10).paragraph_ids
    assert set(short) < set(build_document(QUESTION, POOL, num_paragraphs=30).paragraph_ids)


def test_the_order_is_shuffled() -> None:
    ids = build_document(QUESTION, POOL, num_paragraphs=40).paragraph_ids
    assert list(ids) != sorted(ids) and ids[:4] != QUESTION.own


def test_a_filler_never_has_a_gold_paragraphs_title() -> None:
    pool = {**POOL, 40: Paragraph(40, "Title 1", "A namesake."), 41: Paragraph(41, "TITLE 2", "Another.")}
    ids = build_document(QUESTION, pool, num_paragraphs=40).paragraph_ids
    assert not {40, 41} & set(ids)
    with pytest.raises(InputError, match="36 fillers"):
        build_document(QUESTION, pool, num_paragraphs=41)


@pytest.mark.parametrize("num_paragraphs", [0, 3, 41])
def test_a_number_of_paragraphs_that_cannot_be_is_refused(num_paragraphs: int) -> None:
    with pytest.raises(InputError, match="between 4 and 40"):
        build_document(QUESTION, POOL, num_paragraphs=num_paragraphs)


def test_a_pool_of_another_data_set_is_refused() -> None:
    with pytest.raises(InputError, match="not in the pool"):
        build_document(QUESTION, {i: POOL[i] for i in range(2, 40)}, num_paragraphs=10)


def test_questions_and_pool_are_read_as_they_stand(tmp_path: Path) -> None:
    row = {"id": "q1", "dataset": "d", "split": "dev", "type": "t", "question": "Wo?", "answers": ["É"], "gold": [1]}
    questions, pool = tmp_path / "q.jsonl", tmp_path / "pool.jsonl"
    questions.write_text(json.dumps({**row, "gold_order": None, "own": [1, 2]}) + "\n", encoding="utf-8")
    pool.write_text('{"id": 7, "title": "T", "text": "x"}\n', encoding="utf-8")
    assert load_questions(questions) == [Question("q1", "d", "t", "Wo?", ("É",), (1,), (1, 2))]
    assert load_pool(pool) == {7: Paragraph(7, "T", "x")}


@pytest.mark.parametrize("line", ["{", "[]", '{"id": 7, "title": "T"}'])
def test_a_damaged_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text(f'{{"id": 7, "title": "T", "text": "x"}}\n{line}\n')
    with pytest.raises(InputError, match="line 2"):
        load_pool(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--data"):
        load_questions(tmp_path / "absent.jsonl")
