"""`make demo`: a real question about a real, long text that is on every machine: Python's own standard library.

Nine modules of the running interpreter, over 100,000 tokens. The answer stands in one place. `--check` asks for JSON
instead and checks the answer, its evidence and its line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

QUESTION = "Who contributed the authentication code for imaplib?"
MODULES = (
    "argparse", "configparser", "dataclasses", "difflib", "fractions", "ftplib", "functools", "heapq", "imaplib",
)  # fmt: skip
ANSWER_MODULE, NAMES = "imaplib", ("Donn Cave",)


def main() -> int:
    """Asks; returns the command line's exit code, or 1 where `--check` finds the answer wanting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="ask for JSON, and check answer, evidence and line")
    arguments = parser.parse_args()
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [str(folder / f"{module}.py") for module in MODULES]
    command = [sys.executable, "-m", "antiphon", "ask", *paths, QUESTION]
    if not arguments.check:
        return subprocess.run(command, check=False).returncode
    asked = subprocess.run([*command, "--json"], check=False, stdout=subprocess.PIPE, text=True)
    if asked.returncode:
        return asked.returncode
    print(asked.stdout)
    problems = find_problems(json.loads(asked.stdout), folder / f"{ANSWER_MODULE}.py")
    print("\n".join(problems) or "the answer is right, its evidence verified, its line correct", file=sys.stderr)
    return 1 if problems else 0


def find_problems(answer: dict[str, Any], source: Path) -> list[str]:
    """What is wrong with an answer, in words; empty where it is right."""
    lines = source.read_text().splitlines()
    problems = [f"the answer lacks {name}: {answer['answer']!r}" for name in NAMES if name not in answer["answer"]]
    verified = [item for item in answer["evidence"] if item["verified"] and item["source"] == str(source)]
    if not verified:
        problems.append(f"no verified evidence in {source}")
    elif not any(all(name in _lines_of(lines, item) for name in NAMES) for item in verified):
        problems.append(f"no evidence's lines hold the names: lines {[item['line'] for item in verified]}")
    if answer["usage"]["document_tokens"] < 100_000:
        problems.append(f"the text has only {answer['usage']['document_tokens']} tokens")
    return problems


def _lines_of(lines: list[str], item: dict[str, Any]) -> str:
    """The source's lines that an evidence covers, from its first line on."""
    first = item["line"] - 1
    return " ".join(lines[first : first + item["quote"].count("\n") + 3])


if __name__ == "__main__":
    sys.exit(main())
