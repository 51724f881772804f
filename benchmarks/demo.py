"""`make demo`: a real question about a real, long text that is on every machine: Python's own standard library.

Some 25 modules of the running interpreter, over 100,000 tokens. The answer stands in one place; the demo checks it,
its evidence and its line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

QUESTION = "In the cmd module, what is the default text of PROMPT?"
EXPECTED = "(Cmd)"
MODULES = (
    "argparse", "calendar", "cmd", "code", "codecs", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "difflib", "doctest", "enum", "fractions", "ftplib", "functools", "heapq", "imaplib", "inspect", "locale",
)  # fmt: skip


def main() -> int:
    """Asks; returns the command line's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON only")
    arguments = parser.parse_args()
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [str(folder / f"{module}.py") for module in MODULES]
    command = [sys.executable, "-m", "antiphon", "ask", *paths, QUESTION]
    if arguments.json:
        command.append("--json")
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
