"""Help that shows the defaults of option dataclasses, looked up only when help is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typer.core import TyperCommand

Defaults = Callable[[], Mapping[str, Any]]


def command_with_defaults(defaults: Defaults, *, positionals: str = "") -> type[TyperCommand]:
    """A command class whose help shows `defaults()`, by parameter name: their modules take seconds to import.

    `positionals` is how the usage line names the positional arguments, where typer's own way misleads.
    """

    class CommandWithDefaults(TyperCommand):
        """The parameters stay without a default of their own: None says that a flag was not given."""

        def format_help(self, ctx: Any, formatter: Any) -> None:
            """Fill in the defaults and let typer write the help."""
            found = defaults()
            for param in self.params:
                if param.name in found:
                    param.default = found[param.name]
            super().format_help(ctx, formatter)

        def collect_usage_pieces(self, ctx: Any) -> list[str]:
            """The words of the usage line after the command's name."""
            return ["[OPTIONS]", positionals] if positionals else list(super().collect_usage_pieces(ctx))

    return CommandWithDefaults
