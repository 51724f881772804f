"""`HostTier`: states in memory, outside the pool."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.engine.tiers import PrefixState, absent, no_room
from antiphon.kernels.reference import stored_form

HOST_KNOB = "--host-memory"


@dataclass(frozen=True, eq=False)
class _Held:
    """A state as it is kept, and the dtype that it came in."""

    state: PrefixState
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.state.num_bytes


class HostTier:
    """Holds at most `limit_bytes` of tensors, and refuses what is more: under sweeps any share of the shards serves as
    well as another, and to drop the least recently used would drop just those that come next.

    With `int8`, keys and values in bfloat16 or float32 are kept as int8 with a float32 scale per token and head, as the
    int8 cache has them: LOSSY. What comes back has the dtype that was put, but not its bits; without `int8` it has.
    """

    name = "host"

    def __init__(self, limit_bytes: int, *, int8: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._int8 = int8
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as they are kept."""
        return self._num_bytes

    def has(self, key: bytes) -> bool:
        """See `Tier.has`."""
        return key in self._held

    def put(self, state: PrefixState) -> None:
        """See `Tier.put`."""
        held = _Held(_narrowed(state) if self._int8 else state, state.k.dtype)
        with self._lock:
            self._pop(state.key)
            if self._num_bytes + held.num_bytes > self._limit_bytes:
                raise no_room(self.name, HOST_KNOB, held.num_bytes, self._num_bytes, self._limit_bytes)
            self._held[state.key] = held
            self._num_bytes += held.num_bytes

    def fetch(self, key: bytes) -> PrefixState:
        """See `Tier.fetch`."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                raise absent(self.name, key)
        return held.state if held.state.k.dtype == held.dtype else _widened(held.state, held.dtype)

    def drop(self, key: bytes) -> None:
        """See `Tier.drop`."""
        with self._lock:
            self._pop(key)

    def close(self) -> None:
        """See `Tier.close`: all states."""
        with self._lock:
            self._held.clear()
            self._num_bytes = 0

    def _pop(self, key: bytes) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._num_bytes -= held.num_bytes


def _narrowed(state: PrefixState) -> PrefixState:
    """In int8, where it is not yet."""
    if state.k.dtype == torch.int8:
        return state
    (k, k_scale), (v, v_scale) = _narrow(state.k), _narrow(state.v)
    return replace(state, k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def _narrow(wide: Tensor) -> tuple[Tensor, Tensor]:
    """As `stored_form`, layer by layer: what it makes on the way then stays in a core's cache."""
    stored, scale = torch.empty(wide.shape, dtype=torch.int8), torch.empty(wide.shape[:-1])
    for layer, values in enumerate(wide):
        stored[layer], scale[layer] = stored_form(values, torch.int8)
    return stored, scale


def _widened(state: PrefixState, dtype: torch.dtype) -> PrefixState:
    """The reverse of `_narrowed`, but for what rounding took."""
    assert state.k_scale is not None and state.v_scale is not None
    k, v = _wide(state.k, state.k_scale, dtype), _wide(state.v, state.v_scale, dtype)
    return replace(state, k=k, v=v, k_scale=None, v_scale=None)


def _wide(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return stored.float().mul_(scale.unsqueeze(-1)).to(dtype)
