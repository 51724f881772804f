"""Bad input tried: a clear message on standard error, exit code 2, no traceback, and nothing on standard output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from antiphon.cli.app import main


def refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def ask(path: Path, *options: str, model: Path | str) -> list[str]:
    return ["ask", str(path), "Who kept the light?", "--worker", str(model), "--driver", str(model), *options]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("Ada Torvik kept the light.\n" * 40)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "only white space"),
        (b"text\x00with a NUL", "binary"),
        (b"caf\xe9 in another encoding", "--encoding"),
        (b"%PDF-1.4\ntorn", "PDF"),
    ],
)
def test_a_file_that_cannot_be_read(
    content: bytes, message: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    refused(ask(path, model=tiny_model), message, capsys)


def test_a_model_that_is_not_there(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(ask(book, model="no/such/folder"), "no/such/folder", capsys)


def test_an_unknown_architecture(
    book: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gptx"}))
    refused(ask(book, model=folder), "unknown architecture 'gptx'", capsys)


def test_a_truncated_gguf(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    refused(ask(book, model=torn), "torn.gguf", capsys)


def test_shards_larger_than_the_context(book: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(ask(book, "--shard-tokens", "16200", "--memory", "2GiB", model=tiny_model), "Lower --shard-tokens", capsys)


def test_memory_that_cannot_hold_the_models(book: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(ask(book, "--memory", "100KiB", model=tiny_model), "Raise --memory", capsys)


def test_good_input_is_not_refused(book: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control: the same command without the fault answers."""
    code = main(ask(book, "--memory", "2GiB", "--rounds", "1", "--max-new-tokens", "4", "--quiet", model=tiny_model))
    assert code == 0, capsys.readouterr().err


def test_the_exact_gate_can_be_asked_for_and_the_likelihood_gate_needs_readers(
    book: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--memory", "2GiB", "--rounds", "1", "--max-new-tokens", "4", "--quiet", "--readers", "0")
    exact = ask(book, *few, "--gate", "first-token", "--no-second-reader", model=tiny_model)
    assert main(exact) == 0, capsys.readouterr().err
    capsys.readouterr()
    refused(ask(book, *few, "--gate", "likelihood", model=tiny_model), "needs a number of readers", capsys)
