"""Shared test set-up: the `embedded` marker, and the rule that nothing skips under CI."""

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
    """Under CI a skipped test is a failed one: a check that did not run has shown nothing."""
    report = yield
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and under CI nothing may be: {report.longrepr}"
    return report
