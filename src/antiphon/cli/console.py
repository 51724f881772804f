"""Consoles for standard output and standard error, and text that is safe to show on a terminal."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

# Lines in pipes and files are as long as they are: a quote must stay findable with grep.
_PIPE_WIDTH = 100_000


def stdout_console() -> Console:
    """The console for results."""
    return make_console(sys.stdout)


def stderr_console() -> Console:
    """The console for progress and errors."""
    return make_console(sys.stderr)


def make_console(stream: TextIO) -> Console:
    """A console that writes no control codes where `stream` is no terminal, and no styles where NO_COLOR is set."""
    terminal = stream.isatty()
    return Console(
        file=stream,
        # Rich would otherwise let FORCE_COLOR put control codes into pipes and files.
        force_terminal=terminal,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        width=None if terminal else _PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def supports_live(console: Console) -> bool:
    """Whether the console's stream is a terminal on which a view can be redrawn."""
    return console.is_terminal and not console.is_dumb_terminal


def clean(text: str) -> str:
    """`text` on one line, with nothing in it that a terminal would obey: it comes from documents and models."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def clean_lines(text: str) -> str:
    """The same, line by line: line breaks and indentation stay."""
    lines = text.strip("\r\n").expandtabs(4).splitlines()
    return "\n".join("".join(char if char.isprintable() else " " for char in line).rstrip() for line in lines)


def shorten(text: str, width: int) -> str:
    """The one-line form of `text`, cut to `width` cells with an ellipsis."""
    line = Text(clean(text))
    line.truncate(max(1, width), overflow="ellipsis")
    return line.plain


def shorten_start(text: str, width: int) -> str:
    """The same, cut at the start: of a path and a line, the end says most."""
    line = clean(text)
    while cell_len(line) > width:
        line = "…" + line[2:]
    return line
