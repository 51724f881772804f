"""The configurations a question is asked under, by the names that stand in logs and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from antiphon.engine.errors import InputError

GATES = ("first-token", "likelihood", "both")
_FORMS = "'default', 'full-context', 'gates' (all six), or 'gate=GATE,second-reader=on|off'"


@dataclass(frozen=True)
class Configuration:
    """One way to answer. `None` leaves ParSer's default; `full_context` is the driver's model reading all at once."""

    name: str
    gate: str | None = None
    second_reader: bool | None = None
    full_context: bool = False

    def parser_options(self, num_readers: int) -> dict[str, Any]:
        """The fields of `ParSerOptions` that this configuration sets.

        `num_readers` rows of a query go on where likelihoods rank them, or where a second reader reads them; the
        first-token gate by itself lets all rows go on that did not abstain.
        """
        if self.gate is None:
            return {}
        limited = self.gate != "first-token" or self.second_reader
        readers = num_readers if limited else 0
        return {"gate": self.gate, "second_reader": bool(self.second_reader), "readers": readers}


DEFAULT = Configuration("default")
FULL_CONTEXT = Configuration("full-context", full_context=True)
ALL_GATES = tuple(
    Configuration(f"gate={gate},second-reader={'on' if second else 'off'}", gate, second)
    for gate in GATES
    for second in (False, True)
)


def parse_configurations(text: str) -> tuple[Configuration, ...]:
    """Read a comma list such as `default,gate=both,second-reader=on,full-context`; order kept, repeats dropped.

    A `gate=…` takes the `second-reader=…` after it. Raises `InputError` on anything else.
    """
    known = {configuration.name: configuration for configuration in (DEFAULT, *ALL_GATES, FULL_CONTEXT)}
    chosen: dict[str, Configuration] = {}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    while parts:
        name = parts.pop(0)
        if name.startswith("gate=") and parts and parts[0].startswith("second-reader="):
            name = f"{name},{parts.pop(0)}"
        if name == "gates":
            chosen.update((configuration.name, configuration) for configuration in ALL_GATES)
        elif name in known:
            chosen[name] = known[name]
        else:
            raise InputError(f"configuration {name!r} is not known; give {_FORMS}")
    if not chosen:
        raise InputError(f"no configuration given; give {_FORMS}")
    return tuple(chosen.values())
