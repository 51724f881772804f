"""A grammar says which tokens may come next, and which must; states are independent of each other."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny

from antiphon.engine.errors import InputError
from antiphon.engine.grammar import GrammarCompiler, GrammarState
from antiphon.engine.tokenizer import Tokenizer
from antiphon.methods.worker_reply import reply_grammar

REPLY = 'start: "Unknown" | "{" /[a-c]{1,3}/ "}"'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny.tiny_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tiny.VOCABULARY)


def allowed(state: GrammarState, tokenizer: Tokenizer) -> set[str]:
    mask = state.allowed()
    assert mask.shape == (tiny.VOCABULARY,) and mask.dtype == np.bool_
    return {tokenizer.decode([int(index)]) for index in np.flatnonzero(mask)}


def take(state: GrammarState, tokenizer: Tokenizer, text: str) -> str:
    """Accepts `text` character by character; returns what the last one forced."""
    forced: list[int] = []
    for token_id in tokenizer.encode(text):
        forced = state.accept(token_id)
    return tokenizer.decode(forced)


def test_only_what_fits_is_allowed_at_every_place(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.start(REPLY)
    assert allowed(state, tokenizer) == {"U", "{"}
    take(state, tokenizer, "{")
    assert allowed(state, tokenizer) == {"a", "b", "c"}
    take(state, tokenizer, "ab")
    assert allowed(state, tokenizer) == {"a", "b", "c", "}"}


def test_forced_tokens_are_taken_with_the_token_that_forces_them(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.start(REPLY)
    assert take(state, tokenizer, "U") == "nknown"
    assert state.finished
    assert state.key[1] == tuple(tokenizer.encode("Unknown"))
    other = compiler.start(REPLY)
    assert take(other, tokenizer, "{abc") == "}"
    assert other.finished


def test_at_the_end_only_an_end_token_may_follow(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.start('start: "a" | "ab"')
    take(state, tokenizer, "a")
    assert not state.finished
    assert allowed(state, tokenizer) == {"b", "<|im_end|>"}
    take(state, tokenizer, "b")
    assert state.finished


def test_a_copy_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.start(REPLY)
    take(state, tokenizer, "{")
    copy = state.copy()
    assert copy.key == state.key
    take(copy, tokenizer, "a")
    assert copy.key != state.key
    assert allowed(state, tokenizer) == {"a", "b", "c"}
    assert allowed(copy, tokenizer) == {"a", "b", "c", "}"}


def test_every_start_is_fresh_though_the_grammar_is_compiled_once(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    first = compiler.start(REPLY)
    take(first, tokenizer, "{a")
    assert compiler.start(REPLY).key[1] == ()
    assert compiler.start(REPLY).key == compiler.start(REPLY).key
    assert compiler.start('start: "x"').key != compiler.start(REPLY).key


def test_only_the_last_compiled_grammars_are_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.engine.grammar._MAX_COMPILED", 2)
    compiler = GrammarCompiler(tokenizer, tiny.VOCABULARY)
    for text in ("a", "b", "a", "c"):
        compiler.start(f'start: "{text}"')
    assert [state.key for state in compiler._compiled.values()] == [
        compiler.start(f'start: "{text}"').key for text in ("a", "c")
    ]


def test_a_token_that_does_not_fit_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.start(REPLY)
    with pytest.raises(InputError, match="do not fit"):
        take(state, tokenizer, "x")


@pytest.mark.parametrize("broken", ["", "start: [", "start: missing_rule", 'start: "a', "x" * 1_000_001])
def test_a_broken_grammar_is_the_caller_s_error(compiler: GrammarCompiler, broken: str) -> None:
    with pytest.raises(InputError, match="grammar: "):
        compiler.start(broken)


def test_a_document_s_tokens_cannot_leave_a_string(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Control tokens are never allowed inside a reply's strings."""
    state = compiler.start(reply_grammar("unknown-or-json"))
    assert allowed(state, tokenizer) == {"U", "{"}
    forced = take(state, tokenizer, "{")
    assert forced == '"evidence":"'
    inside = allowed(state, tokenizer)
    assert "a" in inside and " " in inside
    assert not inside & {"<|im_start|>", "<|im_end|>", "<|endoftext|>", '"'}


def test_how_much_of_a_draft_fits_is_told_without_taking_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.start(REPLY)
    take(state, tokenizer, "{")
    key = state.key
    drafts = {"ab}": 3, "abcc": 3, "a-b": 1, "x": 0, "": 0}
    assert {draft: state.num_valid(tokenizer.encode(draft)) for draft in drafts} == drafts
    assert state.key == key and allowed(state, tokenizer) == {"a", "b", "c"}
