"""Where the keys of a batch's rows lie: block tables, as they are, and the runs of consecutive pages in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Tokens that lie in consecutive slots: `first_slot` to `first_slot + num_tokens - 1`."""

    first_slot: int
    num_tokens: int


@dataclass(frozen=True)
class AttentionRow:
    """One row of a batch: its queries are tokens `start` to `stop - 1` of the batch.

    `own` ends with their own keys, just stored; of all keys, the last query sees every one, the one before it all but
    the last, and so on::

        keys            | context run | context run | own (n tokens)       |
        query i of m    |  all seen   |  all seen   | n - (m - 1 - i) seen |

    `own` holds exactly the row's m tokens, except where m is 1: then it is one run, that may reach further back.
    """

    start: int
    stop: int
    context: tuple[Run, ...]
    own: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The rows of one batch, planned once and used by every layer. Plain arrays, all contiguous and on the CPU.

    | field          | dtype | shape         | meaning                                            |
    |----------------|-------|---------------|----------------------------------------------------|
    | block_tables   | int32 | [rows, pages] | page of each `page_tokens` tokens, -1 past the end |
    | row_starts     | int64 | [rows + 1]    | where each row's new tokens start in the batch     |
    | context_tokens | int64 | [rows]        | tokens of the row that were stored before these    |

    Row r's new token i has position `p = context_tokens[r] + i` and lies in slot
    `block_tables[r, p // page_tokens] * page_tokens + p % page_tokens`; its query sees the keys of positions 0 to p.
    """

    block_tables: Tensor
    row_starts: Tensor
    context_tokens: Tensor
    page_tokens: int = 64
    # What a kernel made of these arrays for its own use, under a key of its own: made by the first layer, used by all.
    derived: dict[object, object] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def rows(self) -> tuple[AttentionRow, ...]:
        """The same as runs, for kernels that read whole views: before a row's new tokens (`context`), and its new
        tokens (`own`). A lone new token's run reaches back as far as its pages are consecutive."""
        tables, starts = self.block_tables.tolist(), self.row_starts.tolist()
        rows = []
        for row, context_tokens in enumerate(self.context_tokens.tolist()):
            start, stop, table = starts[row], starts[row + 1], tables[row]
            last = context_tokens + stop - start
            if stop - start == 1:
                *context, own = self._runs(table, 0, last)
                rows.append(AttentionRow(start, stop, tuple(context), (own,)))
            else:
                before = self._runs(table, 0, context_tokens)
                rows.append(AttentionRow(start, stop, before, self._runs(table, context_tokens, last)))
        return tuple(rows)

    def _runs(self, table: Sequence[int], first: int, last: int) -> tuple[Run, ...]:
        """Runs that hold tokens `first` to `last - 1` of a row: pages that follow each other are one run."""
        runs: list[Run] = []
        position = first
        while position < last:
            page_index, offset = divmod(position, self.page_tokens)
            first_slot = table[page_index] * self.page_tokens + offset
            length = self.page_tokens - offset
            while position + length < last and table[page_index + 1] == table[page_index] + 1:
                page_index += 1
                length += self.page_tokens
            length = min(length, last - position)
            runs.append(Run(first_slot, length))
            position += length
        return tuple(runs)
