"""The tiers below the worker's pool: which there are, how large, and where on the disk."""

from __future__ import annotations

import shutil

from antiphon.engine.cache_folder import cache_folder, corpora_folder
from antiphon.engine.disk_tier import DiskTier
from antiphon.engine.host_tier import HostTier
from antiphon.engine.tiers import Tier
from antiphon.scheduler.residency import Tiers

# Of the disk's free space, where --disk-memory is not given.
_DISK_SHARE = 0.5


def disk_limit(disk_memory_bytes: int | None) -> int:
    """Bytes that states may take on the disk: what was given, else a share of what is free there."""
    if disk_memory_bytes is not None:
        return disk_memory_bytes
    return int(shutil.disk_usage(cache_folder()).free * _DISK_SHARE)


def build_tiers(host_memory_bytes: int, disk_memory_bytes: int | None) -> Tiers:
    """Host memory (as int8) where it was given bytes, then the disk, which is emptied when the engine closes; a limit
    of 0 bytes leaves a tier out. Saved corpora lie on the disk, too, for as long as nobody removes them."""
    limit = disk_limit(disk_memory_bytes)
    below: list[Tier] = []
    if host_memory_bytes > 0:
        below.append(HostTier(host_memory_bytes, int8=True))
    if limit > 0:
        below.append(DiskTier(cache_folder() / "tier", limit, temporary=True))
    return Tiers(below, DiskTier(corpora_folder() / "states", limit, temporary=False))
