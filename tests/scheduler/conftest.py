"""One tiny model for all scheduler tests."""

from __future__ import annotations

import pytest
import tiny_models as tiny
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return tiny.random_hf_model("qwen3")
