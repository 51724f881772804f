"""Metrics, their two traps, the recall of shards, and the summary's table."""

from __future__ import annotations

import io
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.errors import InputError
from antiphon.evaluation.configurations import parse_configurations
from antiphon.evaluation.metrics import exact_match, f1, normalise, score, sub_em_paper, sub_em_strict
from antiphon.evaluation.progress import Progress
from antiphon.evaluation.retrieval import most_relevant, recall, shards_of
from antiphon.evaluation.summary import markdown_summary, markdown_table, summarise
from antiphon.evaluation.trials import recall_readers

TEXT = st.text(alphabet=string.ascii_letters + string.punctuation + " é\n", max_size=40)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Battle of\tWaterloo!", "battle of waterloo"),
        ("U.S.A.", "usa"),
        ("a cat, an owl; the theatre", "cat owl theatre"),
        ("Anna and Theo", "anna and theo"),
        ("The", ""),
        ("?!", ""),
        ("Kınar Sıvacıyan", "kınar sıvacıyan"),
    ],
)
def test_normalisation_is_squads(text: str, expected: str) -> None:
    assert normalise(text) == expected


@given(TEXT)
def test_normalising_leaves_no_capital_no_punctuation_and_single_spaces(text: str) -> None:
    result = normalise(text)
    assert result == result.lower() and not set(result) & set(string.punctuation)
    assert result == " ".join(result.split())


def test_sub_em_of_the_papers_goes_both_ways_and_the_strict_one_does_not() -> None:
    assert sub_em_paper("It was Jim Cummings.", ["Jim Cummings"]) == 1
    assert sub_em_strict("It was Jim Cummings.", ["Jim Cummings"]) == 1
    assert sub_em_paper("Cummings", ["Jim Cummings"]) == 1
    assert sub_em_strict("Cummings", ["Jim Cummings"]) == 0
    assert sub_em_paper("Tigger", ["Jim Cummings"]) == 0


def test_trap_unknown_is_right_for_no_in_the_papers_form_only() -> None:
    assert sub_em_paper("Unknown", ["no"]) == 1
    assert sub_em_strict("Unknown", ["no"]) == 0
    assert sub_em_strict("No, it was not.", ["no"]) == 1


@pytest.mark.parametrize("reply", ["", "The", " \n", "..."])
def test_trap_a_reply_of_nothing_is_right_for_anything_in_the_papers_form_only(reply: str) -> None:
    result = score(reply, ["Sonic"])
    assert result.sub_em_paper == 1
    assert (result.sub_em_strict, result.exact_match, result.f1) == (0, 0, 0)


def test_a_gold_answer_of_nothing_is_never_found() -> None:
    assert (sub_em_strict("anything", ["The"]), exact_match("", ["The"]), f1("", ["A"])) == (0, 0, 0)


def test_strict_sub_em_takes_whole_words() -> None:
    assert sub_em_strict("in 1941", ["1941"]) == 1
    assert sub_em_strict("15 people", ["5"]) == 0


def test_exact_match_ignores_case_articles_and_punctuation_alone() -> None:
    assert exact_match("the Sonic!", ["Sonic"]) == 1
    assert exact_match("Sonic hedgehog", ["Sonic"]) == 0


def test_f1_counts_words_as_often_as_they_come() -> None:
    assert f1("Jim Cummings sang", ["Jim Cummings"]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert f1("new york new york", ["new york"]) == pytest.approx(2 * 2 / 6)
    assert f1("Paris", ["London"]) == 0


def test_the_best_of_the_gold_answers_counts_and_none_is_wrong() -> None:
    assert f1("Sonic", ["Tails", "Sonic the Hedgehog"]) == pytest.approx(2 / 3)
    assert exact_match("Sonic", ["Tails", "sonic"]) == 1
    assert score("Sonic", []).sub_em_paper == 0


@given(TEXT, TEXT)
def test_strict_right_is_right_in_the_papers_form_and_exact_is_strict(reply: str, gold: str) -> None:
    result = score(reply, [gold])
    assert result.sub_em_strict <= result.sub_em_paper
    assert result.exact_match <= result.sub_em_strict and result.exact_match <= result.f1 <= 1


def test_a_paragraph_lies_in_every_shard_that_holds_a_character_of_it() -> None:
    shards = [(0, 10), (10, 20), (20, 30)]
    assert shards_of((5, 15), shards) == {0, 1}
    assert shards_of((10, 20), shards) == {1}
    assert shards_of((29, 40), shards) == {2}


def test_recall_is_the_share_of_gold_paragraphs_that_were_looked_at() -> None:
    gold = [frozenset({0, 1}), frozenset({4})]
    assert recall(gold, {1}) == 0.5
    assert recall(gold, {1, 4}) == 1
    assert recall(gold, ()) == 0


def test_most_relevant_shards_come_best_first_without_those_unscored() -> None:
    assert most_relevant([0.1, None, 3.0, -1.0, 3.0], 3) == (2, 4, 0)
    assert most_relevant([None, None], 2) == ()


def test_recall_of_readers_takes_the_ranked_where_likelihoods_ranked_and_else_the_ungated() -> None:
    gold = [frozenset({0}), frozenset({2})]
    scatter = {"gate": "likelihood", "readers": 1, "relevance": [[0.0, 1.0, 5.0]], "ungated": [[0]]}
    assert recall_readers(gold, [scatter]) == 0.5
    assert recall_readers(gold, [scatter, {**scatter, "gate": "first-token"}]) == 1
    assert recall_readers(gold, []) is None


def test_configurations_are_read_from_a_comma_list_although_names_hold_commas() -> None:
    chosen = parse_configurations("default, gate=both,second-reader=on,full-context,default")
    assert [c.name for c in chosen] == ["default", "gate=both,second-reader=on", "full-context"]
    assert chosen[0].parser_options(4) == {}
    assert chosen[1].parser_options(4) == {"gate": "both", "second_reader": True, "readers": 4}
    gates = parse_configurations("gates")
    assert len(gates) == 6
    unlimited = [c.name for c in gates if c.parser_options(4)["readers"] == 0]
    assert unlimited == ["gate=first-token,second-reader=off"]


@pytest.mark.parametrize("text", ["", "gate=both", "second-reader=on", "gate=none,second-reader=on", "defualt"])
def test_an_unknown_configuration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="full-context"):
        parse_configurations(text)


def test_the_summary_leaves_no_trial_out_and_an_error_is_wrong_by_every_metric() -> None:
    right = {"configuration": "a", "prediction": "Sonic", "answers": ["Sonic"], "num_rounds": 2}
    rows: list[dict[str, Any]] = [
        {**right, "seconds": {"read": 1.0, "total": 3.0}},
        {**right, "prediction": "Tails", "num_rounds": 4, "seconds": {"total": 5.0}},
        {"configuration": "a", "prediction": "", "answers": ["Sonic"], "error": "CapacityError: …", "seconds": {}},
        {"configuration": "b", "prediction": "", "answers": ["Sonic"]},
    ]
    first, second = summarise(rows)
    assert (first.configuration, first.num_trials) == ("a", 3)
    assert first.sub_em_paper == pytest.approx(1 / 3) and first.f1 == pytest.approx(1 / 3)
    assert (first.rounds, first.seconds["total"], first.seconds["driver"]) == ((3, 3), (4, 4), None)
    assert (second.sub_em_paper, second.sub_em_strict) == (1, 0)
    table = markdown_summary(rows).splitlines()
    assert table[2].startswith("| a | 3 | 33.3 | 33.3 | 33.3 | 33.3 | 3.0 / 3.0 | 1.0 / 1.0 | – |")
    assert len(table) == 4


def test_a_bar_in_a_cell_does_not_break_the_table() -> None:
    assert markdown_table(("a", "b"), [("x|y", "1")]).splitlines() == ["| a | b |", "| --- | --: |", "| x\\|y | 1 |"]


def test_progress_says_what_is_left_from_what_was_done() -> None:
    times = iter([0.0, 10.0, 30.0])
    stream = io.StringIO()
    progress = Progress(3, stream, lambda: next(times))
    progress.step("one")
    progress.step("two")
    assert stream.getvalue().splitlines() == [
        "[1/3, 0:00:10 gone, 0:00:20 left] one",
        "[2/3, 0:00:30 gone, 0:00:15 left] two",
    ]
