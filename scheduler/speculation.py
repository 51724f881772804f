"""Speculation: a finding quotes its shard, so what follows there is drafted and verified in one step, exactly.

A DECODE step of a row then has its pending tokens and the drafted ones, with logits behind the last of the former and
each of the latter::

    | context_tokens in pages | pending | draft[0] … draft[k - 1] |      logits:  k + 1

Tokens are sampled as always, one after another (`Verification`); a drafted token stays while it is what was sampled, or
forced by the grammar. The keys and values of the others lie behind `context_tokens` in pages of the row's own (a
prefix's full pages are before its pending tokens, its partial last page is a copy), and are overwritten by what is
computed there next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from antiphon.engine.batch import Phase
from antiphon.scheduler.counters import Counters
from antiphon.scheduler.draft_depth import DepthChooser
from antiphon.scheduler.plan import Piece
from antiphon.scheduler.quoted_text import Continuation
from antiphon.scheduler.row import Row

# Of one row in one step.
MAX_DRAFT_TOKENS = 16
# Of all rows in one step: each has its own logits, which are large.
_MAX_STEP_DRAFT_TOKENS = 48


@dataclass
class Speculator:
    """Gives the pieces of a lane's DECODE steps their drafts, and learns from what came of them; none while it is not
    `enabled`."""

    counters: Counters
    enabled: bool = True
    chooser: DepthChooser = field(default_factory=DepthChooser)

    def draft(self, phase: Phase, pieces: Sequence[Piece], step_tokens: int) -> list[Piece]:
        """The same pieces, with what is to be drafted; all together stay within `step_tokens`."""
        if phase is not Phase.DECODE or not self.enabled:
            return list(pieces)
        num_tokens = sum(piece.num_tokens for piece in pieces)
        found = [find_continuation(piece.row) if piece.completes else None for piece in pieces]
        depths = self.chooser.choose(
            [0 if each is None else each.match_tokens for each in found],
            [0 if each is None else len(each.token_ids) for each in found],
            len(pieces),
            num_tokens,
        )
        room = min(_MAX_STEP_DRAFT_TOKENS, step_tokens - num_tokens)
        drafted = []
        for piece, each, depth in zip(pieces, found, depths, strict=True):
            depth = min(depth, room)
            room -= depth
            if each is None or depth == 0:
                drafted.append(piece)
            else:
                drafted.append(replace(piece, draft=each.token_ids[:depth], match_tokens=each.match_tokens))
        return drafted

    def measured(self, phase: Phase, pieces: Sequence[Piece], seconds: float) -> None:
        """A step of these pieces took so long to compute."""
        if phase is Phase.DECODE:
            self.chooser.cost.measured(sum(piece.num_computed for piece in pieces), seconds)
            self.chooser.accepts.forget()

    def verified(self, piece: Piece, num_right: int) -> None:
        """So many of a piece's drafted tokens stayed."""
        self.counters.drafted_tokens += len(piece.draft)
        self.counters.accepted_tokens += num_right
        self.chooser.accepts.verified(piece.match_tokens, len(piece.draft), num_right)


def find_continuation(row: Row) -> Continuation | None:
    """What may follow this row's reply: as far as its grammar allows it, and leaves room for one token more."""
    if row.quotes is None:
        return None
    room = row.params.max_new_tokens - len(row.new_token_ids) - 1
    found = row.quotes.continuation(row.new_token_ids, min(room, MAX_DRAFT_TOKENS))
    if found is None or row.grammar is None:
        return found
    num_valid = row.grammar.num_valid(found.token_ids)
    return replace(found, token_ids=found.token_ids[:num_valid]) if num_valid else None
