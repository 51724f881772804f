"""Counter-based random numbers: the draw for a token depends on seed, row identity and position alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def row_identity(token_ids: Sequence[int]) -> int:
    """A row's identity: the first 64 bits of the SHA-256 of its prefix and suffix tokens. Never an index."""
    digest = hashlib.sha256(np.asarray(token_ids, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def uniform(seed: int, identity: int, position: int) -> float:
    """One number in [0, 1) from Philox with key (seed, identity) and counter `position`."""
    key = np.array([seed & (2**64 - 1), identity], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(counter=position, key=key)).random())
