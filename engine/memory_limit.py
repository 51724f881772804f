"""How much memory this process may use: the cgroup's limit or the machine's, whichever is less."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# Limit, usage, and the field of memory.stat with the file cache that the kernel gives back when memory is short.
_VERSION_2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
_VERSION_1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    "total_inactive_file",
)


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that can still be taken without swapping or meeting the cgroup's limit. A model's file that was just read
    counts as free: it lies in the file cache, which both kinds of limit take for used."""
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file, stat_file, cached_field in (_VERSION_2, _VERSION_1):
        limit, usage = _read_number(cgroup / limit_file), _read_number(cgroup / usage_file)
        if limit is not None and usage is not None:
            used = max(0, usage - _read_field(cgroup / stat_file, cached_field))
            free = min(free, max(0, limit - used))
    return free


def _read_number(path: Path) -> int | None:
    """The number in a cgroup file, or None where there is no file or no limit (`max`)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_field(path: Path, name: str) -> int:
    """A field of a `name value` file, 0 where it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = [value for field, _, value in (line.partition(" ") for line in lines) if field == name]
    return int(values[0]) if values and values[0].isdigit() else 0
