"""Shared test set-up: the `embedded` and `amx` markers, and the rule that nothing skips under CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from antiphon.kernels import native

# pytest imports test files by path: helper modules that several of them share are found here.
sys.path.insert(0, str(Path(__file__).parent / "engine"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "embedded: needs the embedded models (fetched on demand; under CI a failure if not)"
    )
    config.addinivalue_line("markers", "amx: runs on AMX tiles; skipped, also under CI, where the processor has none")


def processor_has_amx() -> bool:
    """What the system says, whatever the extension finds."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and {"amx_tile", "amx_bf16", "amx_int8"} <= set(cpuinfo.read_text().split())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("amx") is None:
        return
    found = native.supported_isas() if native.available() is None else ()
    if "amx" not in found:
        said = native.available() or f"the native kernels are for {found[0]} here"
        if processor_has_amx():
            pytest.fail(f"this processor has AMX tiles, and nothing tests them: {said}")
        pytest.skip(f"needs AMX tiles, which this processor lacks: {said}")


@pytest.fixture(autouse=True)
def one_thread_for_tiny_work(request: pytest.FixtureRequest) -> Generator[None]:
    """Tiny tensors gain nothing from a second thread, and lose much beside another busy process."""
    if request.node.get_closest_marker("embedded"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool_before = native.num_threads() if native.available() is None else None
    if pool_before is not None:
        native.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    if pool_before is not None:
        native.set_num_threads(pool_before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under CI a skipped test is a failed one: a check that did not run has shown nothing. But for what no processor at
    hand could run, and emulation checks (tests/kernels/test_wide_emulated.py)."""
    report = yield
    excused = item.get_closest_marker("amx") is not None and not processor_has_amx()
    if os.environ.get("CI") and not excused and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and under CI nothing may be: {report.longrepr}"
    return report
