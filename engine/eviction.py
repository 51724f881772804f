"""Which prefix leaves the pool when its pages are wanted: small policies behind one interface.

A policy sees only candidates that could leave, and orders them. `LeastRecentlyUsed` is what general engines do;
`FurthestNextUse` is Belady's rule: optimal with the true future, and the sweep's policy with a sweep's prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K")

# When a prefix is used next: earlier is smaller. Tuples compare field by field; what is not known is infinite.
NextUse = tuple[float, float]
NEVER: NextUse = (float("inf"), float("inf"))


class EvictionPolicy(Protocol[K]):
    """Orders keys that may leave. `K` is whatever names a prefix: its key in the engine, an index in a simulation."""

    def used(self, key: K) -> None:
        """The key was used just now, or came in."""
        ...

    def forget(self, key: K) -> None:
        """The key is gone for good."""
        ...

    def order(self, keys: Iterable[K]) -> list[K]:
        """The keys, what should leave first in front."""
        ...


class _Recency(Generic[K]):
    """When each key was used last."""

    def __init__(self) -> None:
        self._clock = 0
        self._last: dict[K, int] = {}

    def used(self, key: K) -> None:
        """The key was used just now, or came in."""
        self._clock += 1
        self._last[key] = self._clock

    def forget(self, key: K) -> None:
        """The key is gone for good."""
        self._last.pop(key, None)

    def _age(self, key: K) -> int:
        return -self._last.get(key, 0)


class LeastRecentlyUsed(_Recency[K]):
    """What was used longest ago leaves first."""

    def order(self, keys: Iterable[K]) -> list[K]:
        """The keys, used longest ago in front."""
        return sorted(keys, key=self._age, reverse=True)


class FurthestNextUse(_Recency[K]):
    """What is needed last leaves first; among equals (what nobody knows a use for), what was used longest ago."""

    def __init__(self, next_use: Callable[[K], NextUse]) -> None:
        super().__init__()
        self._next_use = next_use

    def order(self, keys: Iterable[K]) -> list[K]:
        """The keys, needed last in front."""
        return sorted(keys, key=lambda key: (self._next_use(key), self._age(key)), reverse=True)
