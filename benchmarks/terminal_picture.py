"""A terminal's screen, as captured by `tmux capture-pane -e -p`, as an SVG picture for the documentation.

tmux capture-pane -e -p -t SESSION | python benchmarks/terminal_picture.py docs/images/ask.svg "antiphon ask"
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main(arguments: list[str]) -> int:
    """Reads a screen with its colours from standard input; writes the picture."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    lines = sys.stdin.read().rstrip().splitlines()
    width = max(Text.from_ansi(line).cell_len for line in lines)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
    svg = console.export_svg(title=arguments[1])
    # rich links to fonts elsewhere; a picture should fetch nothing, and any monospaced font will do.
    Path(arguments[0]).write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
