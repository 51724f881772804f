"""One number of threads for all that computes."""

from __future__ import annotations

import pytest
import torch

from antiphon.assembly import set_threads
from antiphon.kernels import native


def test_the_pool_and_torch_get_the_threads_asked_for() -> None:
    set_threads(3)
    assert (native.num_threads(), torch.get_num_threads()) == (3, 3)


def test_without_a_number_torch_gets_as_many_as_the_pool_has() -> None:
    native.set_num_threads(2)
    set_threads(None)
    assert (native.num_threads(), torch.get_num_threads()) == (2, 2)


def test_without_the_extension_torch_alone_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.num_threads()
    monkeypatch.setattr(native, "available", lambda: "not there")
    set_threads(5)
    assert (native.num_threads(), torch.get_num_threads()) == (before, 5)
    set_threads(None)
    assert torch.get_num_threads() == 5
