"""Sizes of memory as people write them: "8GiB", "500 MB", "1.5G"."""

from __future__ import annotations

import re

from antiphon.engine.errors import InputError

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "kib": 2**10,
    "kb": 10**3,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "t": 2**40,
    "tib": 2**40,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})\s*")


def parse_memory_size(text: str) -> int:
    """Bytes in `text`: "8GiB" and "8G" are 8 x 2**30, "8GB" is 8 x 10**9, a bare number is bytes; else `InputError`."""
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else None
    if match is None or unit not in _UNIT_BYTES:
        raise InputError(f"memory size {text!r} is not understood: write a number and a unit, such as 8GiB or 500MB")
    num_bytes = int(float(match[1]) * _UNIT_BYTES[unit]) if "." in match[1] else int(match[1]) * _UNIT_BYTES[unit]
    if num_bytes < 1:
        raise InputError(f"memory size {text!r} is less than one byte: write a number and a unit, such as 8GiB")
    return num_bytes


def format_memory_size(num_bytes: int) -> str:
    """`num_bytes` in the largest binary unit that it fills, with one decimal: 1610612736 is "1.5 GiB"."""
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} bytes"
