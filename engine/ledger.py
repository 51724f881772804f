"""`Ledger`: who holds which bytes. One budget for both models; what can never fit is refused before it is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.engine.errors import CapacityError

GIB = 1 << 30


@dataclass
class Ledger:
    """Absolute bytes by holder. The sum of all entries never exceeds `budget_bytes`."""

    budget_bytes: int
    entries: dict[str, int] = field(default_factory=dict)

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds."""
        return self.budget_bytes - sum(self.entries.values())

    def reserve(self, holder: str, num_bytes: int) -> None:
        """Books `num_bytes` more for `holder`; raises `CapacityError` (and books nothing) where they do not fit."""
        if num_bytes > self.free_bytes:
            raise CapacityError(
                f"memory: {holder} needs {_gib(num_bytes)}, {_gib(max(0, self.free_bytes))} of a budget of "
                f"{_gib(self.budget_bytes)} is free ({self._holders()}). Raise --memory, choose a smaller model, "
                f"or free memory on this machine."
            )
        self.entries[holder] = self.entries.get(holder, 0) + num_bytes

    def release(self, holder: str) -> None:
        """Takes a holder's bytes off the books."""
        self.entries.pop(holder, None)

    def table(self) -> list[tuple[str, int]]:
        """Holders and their bytes, the largest first, then what is free."""
        held = sorted(self.entries.items(), key=lambda entry: -entry[1])
        return [*held, ("free", self.free_bytes)]

    def _holders(self) -> str:
        return ", ".join(f"{holder} {_gib(size)}" for holder, size in self.entries.items()) or "nothing held yet"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
