"""Promises of worker replies: the grammar admits exactly two forms, and the reader uses nothing that is broken."""

from __future__ import annotations

import json
import random
import time
from typing import cast

import llguidance.hf
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from antiphon.engine.errors import InputError
from antiphon.engine.model_source import resolve_model
from antiphon.engine.tokenizer import Tokenizer
from antiphon.methods.worker_reply import ABSTENTION, Abstention, Finding, Malformed, parse_reply, reply_grammar

SHARD = 'def greet(name):\n\tprint("héllo, \\"you\\"")  # C:\\temp\n\n日本語の文。 The ship sailed in 1902.\x01 End'


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


def accepts(masks: LLTokenizer, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    started = matcher(masks, grammar)
    ids = tokenizer.encode(text)
    return started.validate_tokens(ids) == len(ids) and started.consume_tokens(ids) and started.is_accepting()


def random_reply(masks: LLTokenizer, tokenizer: Tokenizer, grammar: str, seed: int) -> str:
    """A reply whose every token is drawn from what the mask allows."""
    draw, started = random.Random(seed), matcher(masks, grammar)
    ids: list[int] = []
    while not started.is_stopped() and len(ids) < 600:
        allowed = np.unpackbits(np.frombuffer(started.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        ids.append(int(draw.choice(allowed)))
        if ids[-1] in tokenizer.eos_ids:
            break
        assert started.consume_token(ids[-1])
    return tokenizer.decode([token for token in ids if token not in tokenizer.eos_ids])


def reply(evidence: str, answer: str) -> str:
    return json.dumps({"evidence": evidence, "answer": answer}, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (ABSTENTION, True),
        (reply('She said "no".\n日本', "no \\ 1"), True),
        (reply("x" * 400, "y" * 200), True),
        (reply("x" * 401, "y"), False),
        (reply("x", "y" * 201), False),
        (reply("", "y"), False),
        (reply("x", ""), False),
        ("Unknown.", False),
        (" Unknown", False),
        ('{"evidence": "x","answer":"y"}', False),
        ('{"answer":"y","evidence":"x"}', False),
        (reply("x", "y") + "\n", False),
        ('{"evidence":"x\n","answer":"y"}', False),
        ('{"evidence":"\\ud800","answer":"y"}', False),
        ("<|im_end|>", False),
    ],
)
def test_a_reply_is_unknown_or_compact_json_and_nothing_else(
    masks: LLTokenizer, tokenizer: Tokenizer, text: str, taken: bool
) -> None:
    assert accepts(masks, tokenizer, reply_grammar("unknown-or-json"), text) is taken


@pytest.mark.embedded
def test_the_first_token_decides_between_abstaining_and_finding(masks: LLTokenizer, tokenizer: Tokenizer) -> None:
    mask = matcher(masks, reply_grammar("unknown-or-json")).compute_bitmask()
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0]
    firsts = {tokenizer.decode([int(token)]) for token in allowed}
    assert firsts == {"U", "Un", "Unknown", "{", '{"'}


@pytest.mark.embedded
@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_model_draws_under_the_grammar_is_a_reply(
    masks: LLTokenizer, tokenizer: Tokenizer, seed: int
) -> None:
    plain = random_reply(masks, tokenizer, reply_grammar("unknown-or-json"), seed)
    assert not isinstance(parse_reply(plain), Malformed) or not json.loads(plain)["evidence"].strip()
    verbatim = random_reply(masks, tokenizer, reply_grammar("verbatim", SHARD), seed)
    if verbatim != ABSTENTION:
        assert json.loads(verbatim)["evidence"] in SHARD


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("evidence", "taken"),
    [
        ('print("héllo, \\"you\\"")', True),
        ("C:\\temp\n\n日本語", True),
        ("本語の", True),
        ("ship sailed in 1902.\x01", True),
        ("ship sailed in 1903.", False),
        ("The ship", True),
        ("The shi", False),
        ("he ship", False),
        ("ship The", False),
        ("", False),
    ],
)
def test_verbatim_evidence_is_a_run_of_the_shards_words_whatever_must_be_escaped(
    masks: LLTokenizer, tokenizer: Tokenizer, evidence: str, taken: bool
) -> None:
    assert accepts(masks, tokenizer, reply_grammar("verbatim", SHARD), reply(evidence, "x")) is taken


@pytest.mark.embedded
def test_a_verbatim_mask_of_a_long_shard_takes_milliseconds(masks: LLTokenizer, tokenizer: Tokenizer) -> None:
    words = random.Random(0)
    sentences = [f"Item {words.randrange(10**6)} was sold to {words.choice('ABCDE')}. for {n} coins" for n in range(60)]
    grammar = reply_grammar("verbatim", "\n".join(sentences))
    started = time.process_time()
    following = matcher(masks, grammar)
    compiled = time.process_time()
    ids = tokenizer.encode(reply(sentences[40], "x"))
    for token in ids:
        following.compute_bitmask()
        assert following.consume_token(token)
    ended = time.process_time()
    assert following.is_accepting()
    assert compiled - started < 1.0
    assert (ended - compiled) / len(ids) < 0.05


def test_verbatim_needs_a_shard() -> None:
    with pytest.raises(InputError, match="shard"):
        reply_grammar("verbatim", "")


@pytest.mark.parametrize(
    "text",
    [
        "Unknown",
        " Unknown\n",
        "Unknown.",
        "**unknown**",
        '"Unknown"',
        "`Unknown`",
        "Unknown, the text is about ships.",
        '{"evidence":"It is a ship.","answer":"Unknown"}',
        '{"evidence":"Unknown","answer":""}',
        "<think>Nothing about {it} here.</think>\n\nUnknown",
    ],
)
def test_every_way_of_saying_unknown_is_an_abstention(text: str) -> None:
    assert parse_reply(text) == Abstention()


@pytest.mark.parametrize(
    "text",
    [
        '{"evidence":"In 1902.","answer":"1902"}',
        '```json\n{"evidence": "In 1902.", "answer": 1902}\n```',
        'Here it is: {"answer": "1902", "evidence": "In 1902."} I hope it helps.',
        '<think>Maybe {"evidence":"x","answer":"y"}?</think>{"evidence":"In 1902.","answer":"1902"}',
    ],
)
def test_findings_are_read_strictly_first_and_then_through_fences_and_prose(text: str) -> None:
    assert parse_reply(text) == Finding("In 1902.", "1902")


@pytest.mark.parametrize(
    "text",
    [
        '{"evidence":"In 1902.","answer":"19',
        '{"evidence":"In 1902',
        '{"evidence":"a {"evidence":"x","answer":"y"}',
        '```json\n{"evidence":"In 1902.","answer":"1902"',
    ],
)
def test_a_reply_cut_by_its_length_is_never_used(text: str) -> None:
    assert parse_reply(text, "length") == Malformed("cut by its length")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The year is 1902.",
        '{"evidence":"","answer":"1902"}',
        '{"answer":"1902"}',
        '{"evidence":"x","answer":[1]}',
        "[1]",
        '{"evidence":"x"',
        '{"a":' * 4000,
        '{"evidence":"  ","answer":"x"}',
    ],
)
def test_what_is_neither_finding_nor_abstention_is_malformed(text: str) -> None:
    assert isinstance(parse_reply(text), Malformed)


def test_lone_surrogates_are_replaced() -> None:
    found = parse_reply('{"evidence":"a \\ud800 b","answer":"x"}')
    assert isinstance(found, Finding)
    assert found.evidence.encode() == b"a ? b"
