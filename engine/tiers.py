"""Where a prefix's state lies when it is not in the pool: `PrefixState`, and what a tier below the pool can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from antiphon.engine.errors import AntiphonError
from antiphon.engine.pages import PAGE_TOKENS


class TierError(AntiphonError):
    """A state could not be stored or fetched: a full disk, a damaged or foreign file. The prefix is read again."""


@dataclass(frozen=True, eq=False)
class PrefixState:
    """Keys and values of the last tokens of a prefix, `[layers, kv_heads, tokens, head_dim]` each; with int8 their
    scales `[layers, kv_heads, tokens]` float32. Contiguous copies that nobody writes to.

    `token_ids` is the whole prefix (compared when it is found), `key` its chain of hashes (`PrefixStore.chain_key`).
    The state covers `token_ids[first_token:]`; what is before lies in pages that the prefix shares with its parent.
    """

    key: bytes
    token_ids: tuple[int, ...]
    first_token: int
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in one order."""
        named = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def num_shared_pages(self) -> int:
        """Pages before the state's first token."""
        return self.first_token // PAGE_TOKENS

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Tier(Protocol):
    """Holds states below the pool, within a limit of its own. Safe to call from any thread."""

    @property
    def name(self) -> str:
        """host or disk."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether a state of this key is there (unchecked: fetching it may still fail)."""
        ...

    def put(self, state: PrefixState) -> None:
        """Keeps a state; raises `TierError` where there is no room or it cannot be written."""
        ...

    def fetch(self, key: bytes) -> PrefixState:
        """A state, checked; raises `TierError` where it is absent or damaged (then it is gone from the tier)."""
        ...

    def drop(self, key: bytes) -> None:
        """Gives a state up; nothing happens where it is absent."""
        ...

    def close(self) -> None:
        """Gives up all that need not outlive the process."""
        ...


def absent(tier: str, key: bytes) -> TierError:
    """The error of a state that is not there."""
    return TierError(f"{tier} tier: there is no state {key.hex()}: its shard is read again")


def no_room(tier: str, knob: str, asked_bytes: int, held_bytes: int, limit_bytes: int) -> TierError:
    """The error of a state that a tier's limit leaves no room for."""
    return TierError(
        f"{tier} tier: a state of {asked_bytes:,} bytes does not fit: {held_bytes:,} of {limit_bytes:,} bytes are "
        f"taken. Raise {knob}; without it the shard is read again"
    )
