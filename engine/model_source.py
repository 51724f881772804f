"""`resolve_model`: from what a user calls a model to its files, configuration and tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub

from antiphon.engine.checkpoint import Checkpoint
from antiphon.engine.config import ModelConfig, config_from_hf
from antiphon.engine.embedded_models import EMBEDDED_MODELS
from antiphon.engine.errors import ModelError
from antiphon.engine.fetch import fetch_embedded
from antiphon.engine.gguf_checkpoint import GgufCheckpoint, read_gguf_header
from antiphon.engine.gguf_config import config_from_gguf
from antiphon.engine.gguf_tokenizer import tokenizer_from_gguf
from antiphon.engine.safetensors_checkpoint import SafetensorsCheckpoint, weight_files
from antiphon.engine.tokenizer import Tokenizer, tokenizer_from_folder

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja")
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4_096
_HEAD_BYTES = 8 << 20


@dataclass(frozen=True)
class ModelSource:
    """A model whose files are here and whose configuration was read. Its weights are not loaded yet.

    `path` is the GGUF file or the safetensors folder. `fingerprint` is a SHA-256 in hex over what determines the
    weights, cheaply: names, sizes, times and headers of the files, and samples of their bytes.
    """

    name: str
    path: Path
    kind: Literal["gguf", "safetensors"]
    config: ModelConfig
    fingerprint: str

    def open(self) -> Checkpoint:
        """The weights, to be read one tensor at a time; raises `ModelError` for damaged files."""
        return GgufCheckpoint(self.path) if self.kind == "gguf" else SafetensorsCheckpoint(self.path)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the weights; raises `ModelError` where it is missing or does not fit."""
        if self.kind == "gguf":
            tokenizer = tokenizer_from_gguf(read_gguf_header(self.path))
        else:
            tokenizer = tokenizer_from_folder(self.path)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ModelError(
                f"{self.name}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only "
                f"{self.config.vocab_size} rows: they are of different models"
            )
        return tokenizer


def resolve_model(name: str, *, revision: str | None = None) -> ModelSource:
    """Find a model by embedded name, .gguf file, safetensors folder or hub repository (`owner/name`, at `revision`).

    Fetches what is not here yet. Raises `ModelError` that says what was looked for and what to change.
    """
    if name in EMBEDDED_MODELS:
        return _gguf_source(name, fetch_embedded(name))
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder_source(name, path)
    if path.is_file():
        return _gguf_source(name, path)
    if _HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        return _folder_source(name, _hub_folder(name, revision))
    raise ModelError(
        f"no model {name!r}: there is no such file or folder, and it is not an embedded model "
        f"({', '.join(EMBEDDED_MODELS)}) nor a hub repository (owner/name)"
    )


def _gguf_source(name: str, path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a .gguf file: give a GGUF file, or the folder of a safetensors model")
    header = read_gguf_header(path)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors.values()}
    try:
        config = config_from_gguf(header.fields, shapes)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return ModelSource(name, path, "gguf", config, _fingerprint([path], b""))


def _folder_source(name: str, folder: Path) -> ModelSource:
    path = folder / "config.json"
    if not path.is_file():
        hint = "; give the .gguf file in it instead" if any(folder.glob("*.gguf")) else ""
        raise ModelError(f"{name!r} is no model: {folder} has no config.json{hint}")
    raw = path.read_bytes()
    try:
        config = config_from_hf(json.loads(raw))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return ModelSource(name, folder, "safetensors", config, _fingerprint(weight_files(folder), raw))


def _hub_folder(repository: str, revision: str | None) -> Path:
    asked = repository if revision is None else f"{repository} at revision {revision}"
    try:
        # The second pattern keeps folders inside the repository (other formats' files) away.
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"]
        )
    except Exception as error:  # The hub's client lets errors of several HTTP libraries through.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{asked} is no file or folder here, and could not be fetched from the hub: {reason}. Check the name, the "
            "network, HF_TOKEN for a gated model and HF_HUB_OFFLINE, or give a local folder, a .gguf file or "
            f"an embedded model ({', '.join(EMBEDDED_MODELS)})"
        ) from error
    return Path(folder)


def _fingerprint(files: Iterable[Path], config: bytes) -> str:
    digest = hashlib.sha256(b"antiphon weights 1\0")
    digest.update(hashlib.sha256(config).digest())
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            # Two fine-tunes of one model share names, sizes and headers: samples tell them apart.
            for i in range(_NUM_SAMPLES):
                file.seek(status.st_size * i // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
