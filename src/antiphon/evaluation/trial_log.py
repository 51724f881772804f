"""`TrialLog`: trials as JSON lines, one per (configuration, question), that a killed run continues without loss."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.engine.errors import InputError

Row = dict[str, Any]


class TrialLog:
    """An append-only JSONL file of trials under one set of settings.

    Every row holds `configuration`, `question_id` and `settings`. Opening reads what is there: a last line torn by a
    kill is dropped from the file, so that its trial runs again; damage anywhere else, a row twice, or rows made under
    other settings raise `InputError`, since going on would mix what must not be compared.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings: Row = json.loads(json.dumps(dict(settings)))
        self._rows: dict[tuple[str, str], Row] = {}
        for row in read_rows(path) if path.exists() else []:
            self._check_settings(row)
            self._rows[_key(row)] = row
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)

    @property
    def rows(self) -> list[Row]:
        """All trials, in the file's order."""
        return list(self._rows.values())

    def has(self, configuration: str, question_id: str) -> bool:
        """Whether this trial is in the file."""
        return (configuration, question_id) in self._rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one trial: on disk whole when this returns. Numbers that are not finite become null.

        Raises `InputError` where the trial is there already.
        """
        full: Row = _finite({**row, "settings": self.settings})
        if _key(full) in self._rows:
            raise InputError(f"trial log {self.path}: {_key(full)} is there already")
        line = (json.dumps(full, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with self.path.open("ab", buffering=0) as file:
            length = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(f"trial log {self.path}: only a part of the row could be written; is the disk full?")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(length)
                raise
        self._rows[_key(full)] = full

    def _check_settings(self, row: Row) -> None:
        theirs = row.get("settings")
        theirs = theirs if isinstance(theirs, dict) else {}
        names = sorted(name for name in {*theirs, *self.settings} if theirs.get(name) != self.settings.get(name))
        if names:
            differences = "; ".join(f"{n} {theirs.get(n)!r}, now {self.settings.get(n)!r}" for n in names)
            raise InputError(
                f"trial log {self.path}: its rows were made under other settings ({differences});"
                " give another --out, or the same settings"
            )


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a log, for reading alone; a torn last line is left out. Raises `InputError` on other damage."""
    if not path.is_file():
        raise InputError(f"trial log: no file {path}")
    rows: dict[tuple[str, str], Row] = {}
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            key = _key(row)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"trial log {path}: line {number} is not a trial ({error!r}); mend or remove it"
            ) from error
        if key in rows:
            raise InputError(f"trial log {path}: line {number} repeats {key}; remove one of the two")
        rows[key] = row
    return list(rows.values())


def _drop_torn_line(path: Path) -> None:
    # A row is whole exactly when its newline is there: the newline is the last byte written.
    content = path.read_bytes() if path.exists() else b""
    num_whole = content.rfind(b"\n") + 1
    if num_whole < len(content):
        os.truncate(path, num_whole)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["configuration"]), str(row["question_id"])


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
