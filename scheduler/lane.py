"""`Lane`: one model's rows, from waiting to retired. The core gives it a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Literal

import torch

from antiphon.engine.batch import Phase
from antiphon.engine.errors import AbortedError, AntiphonError, CapacityError, InputError
from antiphon.engine.eviction import FurthestNextUse
from antiphon.engine.pages import num_pages_for
from antiphon.engine.prefix_store import Prefix, PrefixStore
from antiphon.engine.random_numbers import row_identity
from antiphon.engine.runner import ModelRunner, StepOutput
from antiphon.engine.sampler import Sampled
from antiphon.scheduler.admission import Admission
from antiphon.scheduler.counters import Counters
from antiphon.scheduler.plan import Piece, cut_pieces, num_scores, plan_batch
from antiphon.scheduler.residency import Post, Residency, Tiers, own_thread
from antiphon.scheduler.row import FinishReason, Row, RowKind
from antiphon.scheduler.speculation import Speculator
from antiphon.scheduler.verification import Verification, sample_verified
from antiphon.scheduler.waiting import Waiting

Eviction = Literal["sweep", "lru"]
# Told of each step: its phase and pieces, when it started, and how many rows are live after it.
OnStep = Callable[[Phase, Sequence[Piece], float, int], None]

# After this many steps for other kinds of rows, a less urgent kind gets one: nothing starves.
_AGEING_STEPS = 16


class Lane:
    """Rows of one model. Only the core's thread calls it.

    A row is in exactly one place: `waiting` (lacks pages), `live` (has pages, is stepped) or `held` (its gate has not
    decided; has pages unless a waiting row needed them).
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        store: PrefixStore,
        eos_ids: frozenset[int],
        *,
        step_tokens: int,
        tiers: Tiers | None = None,
        eviction: Eviction = "sweep",
        speculation: bool = True,
        clock: Callable[[], float] = time.monotonic,
        executor: Callable[[str], Executor] = own_thread,
    ) -> None:
        self.name = name
        self.store = store
        self.num_steps = 0
        self._runner = runner
        self._eos_ids = eos_ids
        self._step_tokens = step_tokens
        self.counters = Counters()
        self.speculator = Speculator(self.counters, speculation)
        self.on_step: OnStep | None = None
        self._waiting = Waiting()
        self._clock = clock
        self.residency = Residency(
            store, self._waiting, self.counters, tiers or Tiers(), self, clock=clock, executor=executor
        )
        self._admission = Admission(store, self._waiting, self.residency)
        self._alternates = eviction == "sweep"
        if eviction == "sweep":
            store.policy = FurthestNextUse(self._waiting.next_use)
        self._live: dict[RowKind, list[Row]] = {kind: [] for kind in RowKind}
        self._held: list[Row] = []
        self._blocked_at: float | None = None  # since when all that is left waits for a tier
        self._steps_since = dict.fromkeys(RowKind, 0)

    @property
    def runner(self) -> ModelRunner:
        """Runs the model's batches; for measurements, and on the core's thread alone."""
        return self._runner

    @property
    def has_work(self) -> bool:
        """Whether a step would do something. Held rows wait for other rows, rows over a prefix that is on its way for
        that; neither for a step."""
        return self._blocked_at is None and (bool(self._waiting) or any(self._live.values()))

    def urgency(self) -> RowKind:
        """The most urgent kind of row that waits for a step."""
        return min(kind for kind in RowKind if self._waiting.has(kind) or self._live[kind])

    def connect(self, post: Post) -> None:
        """`post` runs a function on the core's thread: how movement between tiers is told."""

        def wake(work: Callable[[], None]) -> None:
            def run() -> None:
                self._unblock()
                work()

            post(run)

        self.residency.post = wake

    def open_corpus(self, corpus: Hashable, prefixes: Sequence[Prefix]) -> None:
        """From now on rows of this corpus run in sweeps over its prefixes."""
        self._waiting.open(corpus, prefixes, alternates=self._alternates)

    def close_corpus(self, corpus: Hashable) -> None:
        """Forgets a corpus's sweeps."""
        self._waiting.close(corpus)

    def submit(self, row: Row, *, first: bool = False) -> None:
        """Takes a row, with what was kept for its owner; fails it at once, and alone, where it could never fit. `first`
        puts it before the others of its kind."""
        self._unblock()
        self._admission.take_kept(row)
        refusal = self._refusal(row)
        if refusal is not None:
            self._fail(row, refusal)
            return
        row.identity = row_identity(row.token_ids)
        row.phase = Phase.READ if row.kind is RowKind.READ else Phase.EXTEND
        self._waiting.add(row, first=first)

    def fail_waiting(self, prefix: Prefix, error: Exception) -> None:
        """Ends the rows that wait for a prefix which cannot be brought into the pool."""
        for row in list(self._waiting):
            if row.prefix is prefix:
                self._fail(row, error)

    def step(self) -> bool:
        """Admits what fits and runs one batch. False where nothing could run: then all waits for a tier, or the first
        waiting row was failed."""
        self._admission.admit(self._live, self._fail)
        picked = self._pick()
        while picked is None and not self.residency.is_fetching and self._admission.make_room(self._held):
            self._admission.admit(self._live, self._fail)
            picked = self._pick()
        if picked is None and self.residency.is_fetching:
            self._blocked_at = self._clock()
            return False
        if picked is None:
            self._fail_stalled()
            return False
        self.num_steps += 1
        self._run(*picked)
        return True

    def _run(self, phase: Phase, pieces: list[Piece]) -> None:
        """One batch, and what its rows make of it."""
        self._age(pieces[0].row.kind)
        started = self._clock()
        try:
            pieces = self.speculator.draft(phase, pieces, self._step_tokens)
            launched = self._clock()
            output = self._runner.launch(plan_batch(phase, pieces)).result()
            seconds = self._clock() - launched
            if phase is Phase.READ:
                self.residency.measured_read(sum(piece.num_tokens for piece in pieces), seconds)
            self.speculator.measured(phase, pieces, seconds)
            self._commit(phase, pieces, output)
        except Exception as error:  # one bad batch must not end the others' rows
            self._fail_all([piece.row for piece in pieces], error)
        if phase is Phase.DECODE:
            self.counters.decode_steps += 1
            self.counters.decode_seconds += self._clock() - started
        if self.on_step is not None:
            self.on_step(phase, pieces, started, sum(map(len, self._live.values())))

    def resume(self, row: Row) -> None:
        """A gate's decision: the row goes on with the first token it sampled."""
        self._unblock()
        self._held.remove(row)
        if row.pages:
            self._live[row.kind].append(row)
        else:
            row.phase = Phase.EXTEND
            self._waiting.add(row)
        self._take_token(row, row.first_token_id)

    def retire(self, row: Row) -> None:
        """A gate's decision: the row ends with its suffix."""
        self._held.remove(row)
        self._live[row.kind].append(row)
        self.counters.rows_gated += 1
        self._finish(row, FinishReason.GATED)

    def abort(self, rows: Sequence[Row], error: AbortedError | None = None) -> None:
        """Ends these rows, wherever they are."""
        self._fail_all(rows, error or AbortedError("the row was aborted"))

    def abort_all(self, error: AbortedError) -> None:
        """Ends every row, even where the pages' books are wrong by now."""
        for row in self._rows():
            with suppress(AntiphonError):
                self.abort([row], error)

    def drop_kept(self, owner: object) -> None:
        """Ends what runs for `owner`, and releases what was kept for it."""
        self.abort([row for row in self._rows() if row.owner is owner])
        self._admission.drop_kept(owner)

    def check_integrity(self) -> None:
        """Raises unless rows, sessions and the store account for every page."""
        rows = [row.pages for row in self._rows()]
        kept = [kept.pages for kept in self._admission.kept.values()]
        self.store.pool.check_integrity([*rows, *kept, *self.store.holders(), *self.residency.holders()])

    def close(self, error: AbortedError) -> None:
        """Ends every row and all movement."""
        self.residency.close()
        self.abort_all(error)

    def _unblock(self) -> None:
        if self._blocked_at is not None:
            self.counters.tier_waits_seconds += self._clock() - self._blocked_at
            self._blocked_at = None

    def _rows(self) -> list[Row]:
        return [*self._waiting, *(row for group in (*self._live.values(), self._held) for row in group)]

    def _refusal(self, row: Row) -> AntiphonError | None:
        """Why this row could never run, or would end others' rows with its own."""
        known = row.context_tokens if row.prefix is None else row.prefix.num_tokens
        pending = row.token_ids[known:]
        if not pending:
            return InputError(f"{self.name}: a row of {len(row.token_ids)} tokens has none to compute, give it one")
        if min(pending) < 0 or max(pending) >= self._runner.num_input_ids:
            return InputError(
                f"{self.name}: token ids must lie from 0 to {self._runner.num_input_ids - 1}, a row has "
                f"{min(pending)} to {max(pending)}"
            )
        needed = num_pages_for(row.max_tokens)
        if needed > self.store.pool.num_pages:
            return CapacityError(
                f"{self.name}: a row of {row.max_tokens} tokens needs {needed} KV pages, the whole pool has "
                f"{self.store.pool.num_pages}. Raise --memory or ask for fewer tokens."
            )
        return None

    def _pick(self) -> tuple[Phase, list[Piece]] | None:
        """Driver rows, then suffixes and decode rows of the oldest round, then shard reads; all but the first age."""
        kinds = [kind for kind in RowKind if self._live[kind]]
        aged = [kind for kind in kinds if self._steps_since[kind] >= _AGEING_STEPS]
        if not kinds:
            return None
        rows = self._live[(aged or kinds)[0]]
        oldest = min(row.order for row in rows)
        for phase in (Phase.READ, Phase.EXTEND, Phase.DECODE):
            ready = [row for row in rows if row.phase is phase]
            if phase is Phase.EXTEND:
                ready.sort(key=lambda row: row.order)
                if ready and ready[0].order != oldest:
                    continue
            if ready:
                return phase, cut_pieces(ready, self._step_tokens)
        return None

    def _age(self, picked: RowKind) -> None:
        for kind, rows in self._live.items():
            self._steps_since[kind] = self._steps_since[kind] + 1 if rows and kind is not picked else 0

    def _commit(self, phase: Phase, pieces: Sequence[Piece], output: StepOutput) -> None:
        scores = output.scores.tolist()
        checks: list[Verification] = []
        num_logits = 0
        for piece in pieces:
            row = piece.row
            count = num_scores(piece)
            row.scores += scores[:count]
            del scores[:count]
            completes = piece.completes
            row.context_tokens += piece.num_tokens
            if phase is not Phase.DECODE:
                row.prefill_tokens += piece.num_tokens
            if completes and phase is Phase.READ:
                self._finish(row, FinishReason.READ)
            elif completes:
                checks.append(Verification(piece, num_logits))
                num_logits += 1 + len(piece.draft)
        self._sample(checks, output.logits)

    def _sample(self, checks: Sequence[Verification], logits: torch.Tensor) -> None:
        """Samples a token of each row, then another of those whose drafts are right so far, until none is."""
        going = list(checks)
        while going:
            sampled_rows = sample_verified(logits, going, self._runner.kernels.peak)
            for check, sampled in zip(going, sampled_rows, strict=True):
                self._take_sampled(check.row, sampled, logits[check.logit])
            going = [check for check in going if check.advance()]
        for check in checks:
            self.speculator.verified(check.piece, check.num_right)

    def _take_sampled(self, row: Row, sampled: Sampled, logits: torch.Tensor) -> None:
        if sampled.error is not None:
            self._fail(row, AntiphonError(sampled.error))
            return
        if row.params.num_logprobs is not None:
            row.logprobs.append(sampled.logprob)
        if row.phase is Phase.EXTEND:
            row.phase = Phase.DECODE
            if row.first_token_at is None:
                row.first_token_at = time.perf_counter()
            if row.params.max_new_tokens == 0 and row.gate is None:
                self._finish(row, FinishReason.LENGTH)
                return
            if row.gate is not None:
                row.first_token_id = sampled.token_id
                self._live[row.kind].remove(row)
                self._held.append(row)
                row.gate(row, logits)
                return
        self._take_token(row, sampled.token_id)

    def _take_token(self, row: Row, token_id: int) -> None:
        """Appends a token and what the grammar forces after it; ends the row where it has to end."""
        ends = token_id in self._eos_ids and not row.params.ignore_eos
        forced: list[int] = []
        if row.grammar is not None and not ends:
            try:
                forced = row.grammar.accept(token_id)
            except AntiphonError as error:
                self._fail(row, error)
                return
        room = row.params.max_new_tokens - len(row.new_token_ids)
        taken = [token_id, *forced][:room]
        if row.params.num_logprobs is not None:
            row.logprobs += [0.0] * (len(taken) - 1)  # what the grammar forces is certain under it
        row.token_ids += taken
        row.new_token_ids += taken
        if row.on_tokens is not None:
            row.on_tokens(taken)
        if ends or (row.grammar is not None and row.grammar.finished):
            self._finish(row, FinishReason.STOP)
        elif len(row.new_token_ids) >= row.params.max_new_tokens:
            self._finish(row, FinishReason.LENGTH)

    def _finish(self, row: Row, reason: FinishReason) -> None:
        self._forget(row)
        prefix, saved = self._hand_over(row)
        if row.owner is not None:
            self._admission.keep(row)
        self.store.release(row.pages)
        row.pages = []
        row.future.set_result(row.result(reason, prefix, saved))

    def _hand_over(self, row: Row) -> tuple[Prefix | None, Future[None] | None]:
        """A read's pages become those of its prefix."""
        if row.restores is not None:
            self.store.restore(row.restores, row.pages)
            row.pages = []
        if row.keep is None:
            return None, None
        prefix = self.store.declare(row.token_ids, row.pages, keep=row.keep, parent=row.prefix)
        row.pages = []
        return prefix, self.residency.save(prefix) if row.save else None

    def _fail(self, row: Row, error: Exception) -> None:
        """The one place where a row that did not end well gives back what it holds."""
        self._unblock()
        self._forget(row)
        pages, row.pages = row.pages, []
        try:
            self.store.release(pages)
        finally:
            if not row.future.done():
                row.future.set_exception(error)

    def _fail_all(self, rows: Sequence[Row], error: Exception) -> None:
        for row in rows:
            if not row.future.done():
                self._fail(row, error)

    def _forget(self, row: Row) -> None:
        for group in (self._live[row.kind], self._held):
            if row in group:
                group.remove(row)
                return
        self._waiting.remove(row)

    def _fail_stalled(self) -> None:
        """Nothing is live and the first waiting row has no pages: waiting longer would not help it."""
        row, pool = next(iter(self._waiting), None), self.store.pool
        if row is not None:
            self._fail(
                row,
                CapacityError(
                    f"{self.name}: a row needs {num_pages_for(row.max_tokens)} KV pages, {pool.num_free} of "
                    f"{pool.num_pages} are free and the rest is pinned by prefixes. Raise --memory, or release "
                    f"a corpus."
                ),
            )
