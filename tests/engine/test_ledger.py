"""The books never hold more than the budget, and the budget is what the process can really have."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from antiphon.engine.errors import CapacityError
from antiphon.engine.ledger import GIB, Ledger
from antiphon.engine.memory_limit import available_bytes


def test_what_does_not_fit_is_refused_with_all_that_the_user_must_know_and_books_nothing() -> None:
    ledger = Ledger(4 * GIB)
    ledger.reserve("worker weights", 3 * GIB)
    with pytest.raises(CapacityError) as failure:
        ledger.reserve("driver weights", 2 * GIB)
    message = str(failure.value)
    for part in (
        "driver weights needs 2.00 GiB",
        "1.00 GiB of a budget of 4.00 GiB",
        "worker weights 3.00",
        "--memory",
    ):
        assert part in message
    assert ledger.entries == {"worker weights": 3 * GIB}


def test_a_budget_can_be_used_to_the_last_byte_and_not_one_more() -> None:
    ledger = Ledger(100)
    ledger.reserve("pool", 60)
    ledger.reserve("pool", 40)
    assert (ledger.entries, ledger.free_bytes) == ({"pool": 100}, 0)
    with pytest.raises(CapacityError):
        ledger.reserve("pool", 1)


def test_released_bytes_are_free_again_and_unknown_holders_have_none() -> None:
    ledger = Ledger(10)
    ledger.reserve("a", 7)
    ledger.release("a")
    ledger.release("nobody")
    assert ledger.free_bytes == 10


def test_the_table_lists_the_largest_first_and_what_is_free_last() -> None:
    ledger = Ledger(10)
    ledger.reserve("small", 2)
    ledger.reserve("large", 5)
    assert ledger.table() == [("large", 5), ("small", 2), ("free", 3)]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


V1 = "memory/memory."


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "5000000\n", "memory.current": "4500000\n", "memory.stat": "anon 1\ninactive_file 400000\n"},
        {
            f"{V1}limit_in_bytes": "5000000\n",
            f"{V1}usage_in_bytes": "4500000\n",
            f"{V1}stat": "inactive_file 1\ntotal_inactive_file 400000\n",
        },
    ],
)
def test_the_cgroup_s_limit_counts_and_cached_files_are_not_held_against_it(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert available_bytes(write(tmp_path, files)) == 900_000


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ({"memory.max": "1000\n", "memory.current": "4000\n"}, 0),
        ({"memory.max": "1000\n", "memory.current": "400\n", "memory.stat": "inactive_file many\n"}, 600),
    ],
)
def test_a_cgroup_without_statistics_is_read_by_its_usage_alone(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert available_bytes(write(tmp_path, files)) == expected


def test_without_a_limit_the_machine_s_free_memory_counts(tmp_path: Path) -> None:
    free = available_bytes(write(tmp_path, {"memory.max": "max\n", "memory.current": "400\n"}))
    assert free == pytest.approx(psutil.virtual_memory().available, rel=0.5)
