"""`antiphon`: the command line. Exit codes: 0 answered, 2 bad input, 1 anything else."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper

import typer
from rich.text import Text

from antiphon.cli import ask, bench, corpora, doctor, models, plan, read
from antiphon.cli.console import clean_lines, stderr_console
from antiphon.engine.errors import AntiphonError, InputError

_STOPPED = 130


def build_app() -> typer.Typer:
    """The app with all its commands."""
    app = typer.Typer(
        name="antiphon",
        help="Read long documents in parallel with a small model, and reason on what was found with a larger one.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for command in (ask, read, corpora, plan, models, doctor, bench):
        command.add_to(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises for what a user, a file or a model did."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe that is not UTF-8 gets question marks, not an error.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        typer.main.get_command(build_app())(args=arguments, prog_name="antiphon")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
        return _fail("stopped", 1) if code == _STOPPED else code
    except KeyboardInterrupt:
        return _fail("stopped", 1)
    except InputError as error:
        return _fail(str(error), 2)
    except AntiphonError as error:
        return _fail(str(error), 1)
    except Exception as error:
        return _fail(f"unexpected {type(error).__name__}: {error} (ANTIPHON_DEBUG=1 shows where)", 1)
    return 0


def _root() -> None:
    """The group itself: without it, typer would make a lone command the whole app."""


def _fail(message: str, code: int) -> int:
    if os.environ.get("ANTIPHON_DEBUG") == "1":
        traceback.print_exc()
    text = Text.assemble(("antiphon: ", "bold red"), clean_lines(message))
    stderr_console().print(text, soft_wrap=True)
    return code
