"""The C++ driver of tests/csrc passes: the kernels alone, without Python between."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder: Path, sanitize: str) -> Path:
    """The driver, compiled into the checkout's build folder, where a second run finds it done."""
    for tool in ("g++", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not there, and C++ cannot be tested without it")
    command = ["make", "--silent", "-C", str(ROOT / "tests" / "csrc"), "build", f"BUILD={folder}"]
    done = subprocess.run([*command, f"SANITIZE={sanitize}", "-j2"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "driver"


def run(driver: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([driver, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_the_driver_passes(sanitize: str) -> None:
    done = run(build(ROOT / "build" / "csrc" / (sanitize or "plain"), sanitize))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pool_survives_many_short_calls" in done.stdout and "0 failures" in done.stdout


def test_a_driver_that_runs_nothing_has_not_passed() -> None:
    assert run(build(ROOT / "build" / "csrc" / "plain", ""), "no test has this name").returncode == 1
