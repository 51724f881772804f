"""Grammars for replies and turns, by llguidance: which tokens may come next, and which must."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import llguidance.hf
import llguidance.numpy
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from antiphon.engine.errors import InputError
from antiphon.engine.tokenizer import Tokenizer

_MAX_COMPILED = 256
_MAX_GRAMMAR_CHARACTERS = 1_000_000


class GrammarState:
    """Where one row stands in its grammar."""

    def __init__(self, matcher: LLMatcher, source_key: bytes, num_ids: int) -> None:
        self._matcher = matcher
        self._source_key = source_key
        self._num_ids = num_ids
        self._token_ids: list[int] = []

    @property
    def key(self) -> tuple[bytes, tuple[int, ...]]:
        """Equal keys have equal masks: the grammar and the tokens so far."""
        return self._source_key, tuple(self._token_ids)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token could follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarState:
        """An independent state at the same place."""
        copied = GrammarState(self._matcher.deep_copy(), self._source_key, self._num_ids)
        copied._token_ids = list(self._token_ids)
        return copied

    def allowed(self) -> NDArray[np.bool_]:
        """Which ids may come next, `[ids]`."""
        bits = llguidance.numpy.allocate_token_bitmask(1, self._num_ids)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, bits, 0)
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._num_ids].astype(np.bool_)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, could come next; takes none of them."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def accept(self, token_id: int) -> list[int]:
        """Takes a token; returns the tokens that are forced after it, taken as well."""
        self._consume([token_id])
        if self.finished:
            return []
        forced = [int(forced_id) for forced_id in self._matcher.compute_ff_tokens()]
        self._consume(forced)
        return forced

    def _consume(self, token_ids: list[int]) -> None:
        if token_ids and not self._matcher.consume_tokens(token_ids):
            raise InputError(f"grammar: tokens {token_ids} do not fit: {self._matcher.get_error()}")
        self._token_ids += token_ids


class GrammarCompiler:
    """Compiles Lark grammars for one tokenizer; keeps the last few."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int) -> None:
        self._num_ids = num_ids
        self._tokenizer = llguidance.hf.from_tokenizer(
            tokenizer.hf, n_vocab=num_ids, eos_token=sorted(tokenizer.eos_ids)
        )
        self._compiled: OrderedDict[bytes, GrammarState] = OrderedDict()

    def start(self, lark: str) -> GrammarState:
        """A state at the grammar's beginning; raises `InputError` for a grammar that llguidance refuses."""
        if len(lark) > _MAX_GRAMMAR_CHARACTERS:
            raise InputError(f"grammar: {len(lark)} characters, at most {_MAX_GRAMMAR_CHARACTERS} are taken")
        key = hashlib.sha256(lark.encode()).digest()
        if key not in self._compiled:
            matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark))
            if matcher.is_error():
                raise InputError(f"grammar: {matcher.get_error()}")
            self._compiled[key] = GrammarState(matcher, key, self._num_ids)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key].copy()
