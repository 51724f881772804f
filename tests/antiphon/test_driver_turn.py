"""Promises of driver turns: what they mean, and that the grammar writes only turns that mean something."""

from __future__ import annotations

import random
from typing import cast

import llguidance.hf
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from antiphon.engine.model_source import resolve_model
from antiphon.engine.tokenizer import Tokenizer
from antiphon.methods.driver_grammar import QUERY_CHARS, TurnKind, driver_grammar
from antiphon.methods.driver_turn import FinalAnswer, Invalid, Queries, classify_turn, spoken_text


def call(query: str) -> str:
    return f'<tool_call>\n{{"name": "query_agents", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


CALL, ANSWER = call("Who?"), "<answer>Chile</answer>"


def test_calls_win_over_an_answer_in_the_same_turn() -> None:
    assert classify_turn(f"{ANSWER}\n{CALL}\n{call(' Where? ')}") == Queries(("Who?", "Where?"))
    assert classify_turn(ANSWER) == FinalAnswer("Chile")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("<answer>a</answer> no, <answer> b </answer>", FinalAnswer("b")),
        ("<answer>a < b, List<int></answer>", FinalAnswer("a < b, List<int>")),
        ("<think><answer>a</answer></think><answer>b</answer>", FinalAnswer("b")),
        ("So: <answer>b", FinalAnswer("b")),
    ],
)
def test_the_last_answer_outside_of_thought_counts(text: str, meaning: FinalAnswer) -> None:
    assert classify_turn(text) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is Chile.",
        "<answer> </answer>",
        "</answer>",
        "<tool_call>\n{",
        call(" "),
        call("x" * 3000),
        CALL.replace('"query"', '"question"'),
        CALL.replace("query_agents", "search"),
        f"<think>{CALL}{ANSWER}",
    ],
)
def test_a_turn_that_neither_asks_nor_answers_is_invalid_with_a_reason(text: str) -> None:
    meaning = classify_turn(text)
    assert isinstance(meaning, Invalid)
    assert meaning.reason


def test_a_turn_cut_by_its_length_counts_only_for_what_is_complete() -> None:
    assert isinstance(classify_turn("I think <answer>Chi", finish_reason="length"), Invalid)
    assert isinstance(classify_turn(CALL[:50], finish_reason="length"), Invalid)
    assert classify_turn(f"{CALL}\n{CALL[:50]}", finish_reason="length") == Queries(("Who?",))


def test_a_thought_that_began_in_the_prompt_is_not_searched() -> None:
    text = f"maybe {ANSWER.replace('Chile', 'Peru')} or {CALL}</think>\n\n{ANSWER}"
    assert classify_turn(text, in_thinking=True) == FinalAnswer("Chile")
    assert spoken_text(text, in_thinking=True) == ANSWER


def test_a_lone_surrogate_in_a_query_is_replaced() -> None:
    meaning = classify_turn(call("a \\ud800"))
    assert meaning == Queries(("a ?",))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return resolve_model("qwen2.5-coder-0.5b").tokenizer()


@pytest.fixture(scope="module")
def masks(tokenizer: Tokenizer) -> LLTokenizer:
    fast = cast(PreTrainedTokenizerFast, tokenizer.hf)
    return llguidance.hf.from_tokenizer(fast, eos_token=sorted(tokenizer.eos_ids))


def matcher(masks: LLTokenizer, grammar: str) -> LLMatcher:
    started = LLMatcher(masks, LLMatcher.grammar_from_lark(grammar))
    assert not started.is_error(), started.get_error()
    return started


def takes(masks: LLTokenizer, grammar: str, ids: list[int]) -> bool:
    started = matcher(masks, grammar)
    return started.validate_tokens(ids) == len(ids) and started.consume_tokens(ids) and started.is_accepting()


TURNS: list[tuple[str, set[str]]] = [
    (CALL, {"query", "query-or-answer"}),
    ("\n".join([CALL] * 4), {"query", "query-or-answer"}),
    ("\n".join([CALL] * 5), set()),
    (call("x" * QUERY_CHARS), {"query", "query-or-answer"}),
    (call("x" * (QUERY_CHARS + 1)), set()),
    (call('the \\"Blue\\" one, 日本?'), {"query", "query-or-answer"}),
    (call("two\\nlines"), set()),
    (call(""), set()),
    (CALL.replace("query_agents", "search"), set()),
    (f"{CALL}\n{ANSWER}", set()),
    (ANSWER, {"query-or-answer", "answer"}),
    ("<answer>List<int> a < b,\nc</answer>", {"query-or-answer", "answer"}),
    ("<answer></answer>", set()),
    (f"<answer>{'x' * 1001}</answer>", set()),
    (f"{ANSWER}{ANSWER}", set()),
    ("Chile", set()),
]


@pytest.mark.embedded
@pytest.mark.parametrize("kind", ["query", "query-or-answer", "answer"])
@pytest.mark.parametrize(("text", "kinds"), TURNS)
def test_the_grammar_takes_exactly_the_turns_of_its_kind(
    masks: LLTokenizer, tokenizer: Tokenizer, kind: TurnKind, text: str, kinds: set[str]
) -> None:
    assert takes(masks, driver_grammar(kind), tokenizer.encode_control(text)) is (kind in kinds)


@pytest.mark.embedded
def test_calls_are_written_with_the_tokenizers_own_call_tokens(masks: LLTokenizer, tokenizer: Tokenizer) -> None:
    as_tokens, as_text = tokenizer.encode_control(CALL), tokenizer.encode(CALL)
    assert as_tokens[0] == tokenizer.token_id("<tool_call>") and as_text != as_tokens
    assert takes(masks, driver_grammar("query"), as_tokens)
    assert not takes(masks, driver_grammar("query"), as_text)
    assert takes(masks, driver_grammar("query", special_tokens=False), as_text)


@pytest.mark.embedded
def test_after_a_call_the_turn_may_end_or_call_again(masks: LLTokenizer, tokenizer: Tokenizer) -> None:
    started = matcher(masks, driver_grammar("query"))
    assert started.consume_tokens(tokenizer.encode_control(CALL))
    allowed = np.unpackbits(np.frombuffer(started.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
    assert set(allowed.tolist()) == {*tokenizer.eos_ids, *tokenizer.encode("\n")}


@pytest.mark.embedded
def test_a_thought_may_come_first_where_thinking_is_on(masks: LLTokenizer, tokenizer: Tokenizer) -> None:
    text = f"<think>I need {{a}} <b>\n</think>\n\n{CALL}"
    # This tokenizer has no token for `</think>`, so the thought is text.
    grammar = driver_grammar("query", thinking=True, special_tokens=False)
    assert takes(masks, grammar, tokenizer.encode(text))
    assert not takes(masks, driver_grammar("query", special_tokens=False), tokenizer.encode(text))


@pytest.mark.embedded
@pytest.mark.parametrize("kind", ["query", "query-or-answer", "answer"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_driver_draws_under_the_grammar_is_an_action(
    masks: LLTokenizer, tokenizer: Tokenizer, kind: TurnKind, seed: int
) -> None:
    draw, started = random.Random(seed), matcher(masks, driver_grammar(kind))
    ids: list[int] = []
    while not started.is_stopped():
        allowed = np.unpackbits(np.frombuffer(started.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        ids.append(int(draw.choice(allowed)))
        if ids[-1] in tokenizer.eos_ids:
            break
        assert started.consume_token(ids[-1])
    meaning = classify_turn(tokenizer.decode([token for token in ids if token not in tokenizer.eos_ids]))
    expected = {"query": Queries, "answer": FinalAnswer}.get(kind, (Queries, FinalAnswer))
    assert isinstance(meaning, expected)
