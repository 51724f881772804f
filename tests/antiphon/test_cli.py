"""The command line: exit codes, where output goes, and what it looks like on a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from antiphon.assembly import EngineOptions
from antiphon.cli.answer_view import answer_json, print_answer
from antiphon.cli.app import main
from antiphon.cli.ask_settings import ask_settings, flag_defaults
from antiphon.cli.console import make_console
from antiphon.cli.fetching import PrintedTenths
from antiphon.cli.progress import show_progress
from antiphon.engine.errors import AntiphonError, InputError
from antiphon.events import ReadProgress, RoundStarted
from antiphon.kernels import native
from antiphon.kernels.registry import COMPOSED
from antiphon.methods.options import ParSerOptions
from antiphon.results import Answer, Evidence, RoundRecord, Seconds, Usage

_ANSWER = Answer(
    answer="Ada Torvik\nkept the light.",
    method="parser",
    evidence=[
        Evidence("velm.txt", 4, 9, 17, None, "Ada Torvik " * 30, "Ada Torvik", True, 0.834, 2, "Who?", 1),
        Evidence("velm.pdf", -1, -1, None, 3, "Ada \x1b[2Jkept it", "Ada", False, None, 5, "Who?", 2),
    ],
    rounds=[RoundRecord(("Who?",), 2, 94, 4.0)],
    usage=Usage(98_304, 96, 98_304, 97_000, 412, 1_204, 830, 220),
    seconds=Seconds(1.0, 80.0, 12.0, 9.0, 104.0),
    notes=["skipped a.bin: is binary"],
)


def printed(answer: Answer, *, quiet: bool = False) -> str:
    stream = io.StringIO()
    print_answer(make_console(stream), answer, quiet=quiet)
    return stream.getvalue()


class Terminal:
    """A pseudo-terminal of 80 columns, read as a person's would be."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")

    def read_all(self) -> str:
        self.stream.close()
        pieces = []
        while True:
            try:
                piece = os.read(self._master, 65_536)
            except OSError:
                break
            if not piece:
                break
            pieces.append(piece)
        os.close(self._master)
        return b"".join(pieces).decode()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ask", "book.txt"], 2, "give both, the question last"),
        (["ask"], 2, "PATH… QUESTION"),
        (["ask", "book.txt", " "], 2, "the question is empty"),
        (["ask", "missing.txt", "who?"], 2, "missing.txt"),
        (["ask", __file__, __file__], 2, "is a file: add the question after it"),
        (["ask", __file__, "who?", "--memory", "much"], 2, "memory size 'much'"),
        (["ask", __file__, "who?", "--gate", "closed"], 2, "closed"),
        (["ask", __file__, "who?", "--worker", "no/such.gguf"], 2, "no/such.gguf"),
        (["ask", __file__, "who?", "--encoding", "klingon"], 2, "klingon"),
        (["ask", __file__, "who?", "--quantization", "int4"], 2, "int4"),
        (["ask", __file__, "who?", "--kv-cache-dtype", "fp8"], 2, "fp8"),
        (["ask", __file__, "who?", "--dtype", "float32", "--quantization", "int8"], 2, "it does not go with"),
        (["bench", "round", "--dtype", "float32", "--quantization", "int8"], 2, "it does not go with"),
        (["ask", __file__, "who?", "--nonsense"], 2, "--nonsense"),
        (["models", "fetch", "gpt-9"], 2, "gpt-9"),
        (["bench", "round", "--shards", "0"], 2, "at least 1"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_ends_with_2_and_a_message_on_standard_error(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("the file is odd"), 2, "antiphon: the file is odd\n"),
        (AntiphonError("the row was aborted"), 1, "antiphon: the row was aborted\n"),
        (ZeroDivisionError("by zero"), 1, "antiphon: unexpected ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), 1, "antiphon: stopped\n"),
    ],
)
def test_every_error_has_its_exit_code_and_no_traceback_unless_wanted(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("antiphon.cli.doctor.doctor", fail)
    monkeypatch.delenv("ANTIPHON_DEBUG", raising=False)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err.startswith(message)
    monkeypatch.setenv("ANTIPHON_DEBUG", "1")
    assert main(["doctor"]) == code
    assert "Traceback" in capsys.readouterr().err or isinstance(error, KeyboardInterrupt)


@pytest.mark.parametrize("arguments", [["--help"], ["ask", "--help"], ["models", "fetch", "--help"]])
def test_help_is_no_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: antiphon" in capsys.readouterr().out


def test_help_shows_the_defaults_of_the_options_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = flag_defaults()
    assert defaults["worker"] == EngineOptions().worker
    assert defaults["shard_tokens"] == ParSerOptions().shard_tokens
    main(["ask", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in ("worker", "driver", "shard_tokens", "max_new_tokens", "gate", "quantization", "kv_cache_dtype"):
        assert f"[default: {defaults[flag]}]" in text, flag


def test_every_flag_sets_a_field_that_exists() -> None:
    sizes = {"memory": "1GiB", "host_memory": "0", "disk_memory": "2GB"}
    flags = dict.fromkeys(flag_defaults(), 1) | sizes | {"readers": 2, "threads": 3}
    settings = ask_settings(["a.txt", "b.txt", " who? "], None, flags)
    assert settings.paths == ("a.txt", "b.txt")
    assert settings.question == "who?"
    assert settings.engine["memory_bytes"] == 2**30
    assert settings.engine["host_memory_bytes"] == 0
    assert settings.engine["disk_memory_bytes"] == 2 * 10**9
    assert settings.parser["readers"] == 2
    assert set(settings.engine) <= {field.name for field in fields(EngineOptions)}
    assert set(settings.parser) <= {field.name for field in fields(ParSerOptions)}


def test_what_was_not_given_overrides_nothing() -> None:
    settings = ask_settings(["-", "who?"], None, {"worker": None, "gate": None, "seed": 0, "second_reader": False})
    assert settings.engine == {}
    assert settings.parser == {"seed": 0, "second_reader": False}


def test_an_answer_is_printed_with_its_evidence_and_its_cost() -> None:
    text = printed(_ANSWER)
    for piece in (
        "Answer\n  Ada Torvik\n  kept the light.\n",
        "  ✓ velm.txt:17\n",
        "  unverified velm.pdf p. 3\n",
        "shard 2, round 1, relevance 0.83\n",
        "skipped a.bin: is binary\n",
        "  worker        98,304      97,000         412\n",
        "document of 98,304 tokens in 96 shards, 1 round, method parser\n",
        "load 1.0 s, read 80.0 s, rounds 12.0 s, driver 9.0 s, total 104.0 s\n",
    ):
        assert piece in text, piece
    assert "\x1b" not in text
    assert ("Ada Torvik " * 30).strip() in text, "in a pipe, quotes are not broken into lines"
    assert not any(line.endswith(" ") for line in text.split("\n"))


def test_quiet_prints_the_answer_alone() -> None:
    assert printed(_ANSWER, quiet=True) == "Ada Torvik\nkept the light.\n"


def test_json_is_one_object_on_one_line_whatever_is_in_it() -> None:
    odd = replace(_ANSWER.evidence[0], quote="é \ud800 \n", relevance=math.nan)
    text = answer_json(replace(_ANSWER, evidence=[odd]))
    assert text.isascii()
    assert "\n" not in text
    parsed = json.loads(text)
    assert parsed["evidence"][0]["relevance"] is None
    assert set(parsed) >= {"answer", "method", "evidence", "rounds", "usage", "seconds", "stopped"}


def test_a_terminal_gets_colours_and_no_color_takes_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    print_answer(make_console(coloured.stream), _ANSWER, quiet=False)
    assert "\x1b[" in coloured.read_all()
    monkeypatch.setenv("NO_COLOR", "1")
    print_answer(make_console(plain.stream), _ANSWER, quiet=False)
    assert "\x1b" not in plain.read_all()


def test_a_pipe_gets_no_codes_even_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in printed(_ANSWER)


def test_the_live_view_is_drawn_on_a_terminal_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    with show_progress(make_console(terminal.stream), quiet=False) as sink:
        sink(ReadProgress(3, 5, 3000, 5000))
        sink(RoundStarted(1, ("Who kept the light?",), 5))
        time.sleep(0.5)
    text = terminal.read_all()
    assert "3/5 shards" in text
    assert "Who kept the light?" in text
    # The last thing written erases the lines of the view: up one line, clear it, for each.
    assert text.rstrip("\r\n").endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_dumb_terminal_gets_lines_and_quiet_gets_none(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with show_progress(make_console(terminal.stream), quiet=quiet) as sink:
        sink(ReadProgress(3, 5, 3000, 5000))
    assert ("read 3/5 shards" in terminal.read_all()) is not quiet


def test_fetching_without_a_terminal_prints_a_line_at_each_tenth() -> None:
    stream = io.StringIO()
    report = PrintedTenths("small", make_console(stream))
    for done in range(0, 2049):
        report(done, 2048)
    assert len(stream.getvalue().splitlines()) == 10
    assert stream.getvalue().endswith("small  2.0 KiB of 2.0 KiB\n")


def test_doctor_says_who_serves_each_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    pieces = ("processor", "torch", "paged_attention", "rms_norm", "qwen2.5-coder-0.5b", "memory", "native uses")
    for piece in (*pieces, f"{native.isa()} (ANTIPHON_CPU_ISA can ask for"):
        assert piece in out, piece


@pytest.mark.parametrize("isa", native.supported_isas() if native.available() is None else ())
def test_doctor_says_who_serves_what_follows_a_norm_or_what_it_is_composed_of(
    isa: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for operation, composed in COMPOSED.items():
        found = [" ".join(line.split()[1:]) for line in lines if line.split()[:1] == [operation]]
        # float32; bfloat16 weights; int8 weights over two caches; bfloat16 throughout
        fused = [f"{name} (then {composed})" for name in ("native", "native_int8", "native_int8")]
        assert found == [composed, *(fused if isa == "amx" else [composed] * 3), composed]
    assert (f"is for AMX tiles; {isa} runs one operation after the other" in "\n".join(lines)) == (isa != "amx")


def test_doctor_refuses_an_instruction_set_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_CPU_ISA", "mmx")
    assert main(["doctor"]) == 2
    assert "ANTIPHON_CPU_ISA is 'mmx'" in capsys.readouterr().err


def test_models_list_names_every_embedded_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path))
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    assert all("not fetched" in line for line in lines)


def _arguments(tiny_model: Path, document: str, *more: str) -> list[str]:
    models = ["--worker", str(tiny_model), "--driver", str(tiny_model)]
    small = ["--rounds", "1", "--max-new-tokens", "8", "--shard-tokens", "64", "--memory", "1GiB"]
    return ["ask", document, "Who kept the light?", *models, *small, *more]


def test_json_is_all_that_is_written(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "Ada Torvik kept the light of Velm.\n" * 8
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code = main(_arguments(tiny_model, "-", "--json"))
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    parsed = json.loads(out)
    assert parsed["usage"]["shards"] >= 4
    assert len(parsed["rounds"]) == 1


def test_without_a_terminal_progress_is_lines_and_the_answer_is_on_standard_output(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "velm.txt"
    document.write_text("Ada Torvik kept the light of Velm.\n" * 8)
    assert main(_arguments(tiny_model, str(document))) == 0
    out, err = capfd.readouterr()
    assert "round 1: asking" in err
    assert out.startswith("Answer\n")
    assert "Cost\n" in out
    assert "\x1b" not in out + err


def test_ctrl_c_stops_with_1_and_one_line(tiny_model: Path, tmp_path: Path) -> None:
    document = tmp_path / "long.txt"
    document.write_text("".join(f"Line {index} of a long document.\n" for index in range(20_000)))
    command = [sys.executable, "-m", "antiphon", *_arguments(tiny_model, str(document), "--threads", "1")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert first.startswith("worker "), first + err
    assert process.returncode == 1
    assert out == ""
    assert err.splitlines()[-1] == "antiphon: stopped"
    assert "Traceback" not in err
