"""What `antiphon ask` was asked: flags sorted into the options that they override, and those options' own defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from antiphon.engine.errors import InputError
from antiphon.memory_size import parse_memory_size

# Flag: the field that it sets. What is not here has the field's own name.
_ENGINE_FIELDS = {
    "worker": "worker",
    "driver": "driver",
    "worker_revision": "worker_revision",
    "driver_revision": "driver_revision",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "speculation": "speculation",
    "threads": "threads",
    "memory": "memory_bytes",
    "host_memory": "host_memory_bytes",
    "disk_memory": "disk_memory_bytes",
    "trace": "trace",
}
_SIZES = ("memory", "host_memory", "disk_memory")
_PARSER_FIELDS = {
    "rounds": "rounds",
    "max_new_tokens": "worker_max_new_tokens",
    "temperature": "worker_temperature",
    "seed": "seed",
    "gate": "gate",
    "readers": "readers",
    "second_reader": "second_reader",
    "query_first": "query_first",
    "overlap": "overlap",
    "reply_grammar": "reply_grammar",
    "shard_tokens": "shard_tokens",
    "shard_overlap": "shard_overlap",
}


@dataclass(frozen=True)
class AskSettings:
    """A question and its document's paths; `engine` and `parser` hold only the options that were given."""

    paths: tuple[str, ...]
    question: str
    encoding: str | None
    engine: Mapping[str, Any]
    parser: Mapping[str, Any]


def ask_settings(arguments: Sequence[str], encoding: str | None, flags: Mapping[str, Any]) -> AskSettings:
    """Sort out positionals and flags (None is not given); raises `InputError` where there is no path or no question."""
    *paths, question = arguments
    if not paths:
        raise InputError(f"ask needs a PATH and a QUESTION, there is only {question!r}: give both, the question last")
    if not question.strip():
        raise InputError("the question is empty: write it as the last argument, in quotes")
    if len(question) < 256 and Path(question).exists():
        raise InputError(
            f"the last argument must be the question, and {question!r} is a file: add the question after it"
        )
    engine, parser = sort_flags(flags)
    return AskSettings(tuple(paths), question.strip(), encoding, engine, parser)


def sort_flags(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `EngineOptions` and of `ParSerOptions` from the flags that were given (None is not)."""
    given = {name: value for name, value in flags.items() if value is not None}
    given.update({name: _size(given[name]) for name in _SIZES if name in given})
    return _pick(given, _ENGINE_FIELDS), _pick(given, _PARSER_FIELDS)


def flag_defaults() -> dict[str, Any]:
    """For each flag the default of the option that it overrides, where that has one to show."""
    from antiphon.assembly import EngineOptions
    from antiphon.methods.options import ParSerOptions

    defaults: dict[str, Any] = {}
    for options, flags in ((EngineOptions, _ENGINE_FIELDS), (ParSerOptions, _PARSER_FIELDS)):
        own = {field.name: field.default for field in fields(options) if field.default is not MISSING}
        defaults.update({flag: own[name] for flag, name in flags.items() if own.get(name) is not None})
    return defaults


def _size(text: str) -> int:
    return 0 if text.strip() == "0" else parse_memory_size(text)


def _pick(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: given[flag] for flag, name in names.items() if flag in given}
