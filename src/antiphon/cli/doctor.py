"""`antiphon doctor`: what this machine is, who computes what on it and why not another, and which models are there."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from antiphon.cli.console import stdout_console
from antiphon.memory_size import format_memory_size

if TYPE_CHECKING:
    from antiphon.kernels.registry import OperationReport

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "llguidance", "huggingface_hub", "numpy")
_LABEL_WIDTH = 18


def doctor() -> None:
    """Show the machine, the libraries, who serves each operation and why the others do not, and the models at hand."""
    console = stdout_console()
    for title, lines in (
        ("Machine", _machine_lines()),
        ("Versions", _version_lines()),
        ("Operations", _operation_lines()),
        ("Models", _model_lines()),
    ):
        console.print(Text(title, "bold"))
        for label, text, style in lines:
            _print_row(console, label, text, style)
        console.print()


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("doctor")(doctor)


def _print_row(console: Console, label: str, text: str, style: str) -> None:
    console.print(Text.assemble((f"  {label:<{_LABEL_WIDTH}} ", style), text), soft_wrap=True)


def _machine_lines() -> Iterator[tuple[str, str, str]]:
    from antiphon.engine.memory_limit import available_bytes
    from antiphon.machine import detect_machine

    machine = detect_machine()
    yield "processor", machine.cpu, ""
    yield "instructions", ", ".join(machine.instruction_sets) or "none of those that kernels here look for", ""
    yield "cores", f"{machine.physical_cores} physical, {machine.usable_cores} usable", ""
    free, there = format_memory_size(available_bytes()), format_memory_size(machine.memory_bytes)
    yield "memory", f"{free} can be taken now, of {there}", ""
    yield "system", platform.platform(), ""


def _version_lines() -> Iterator[tuple[str, str, str]]:
    import torch

    yield "antiphon", _version("antiphon"), ""
    yield "python", platform.python_version(), ""
    for name in _LIBRARIES:
        yield name, _version(name), ""
    yield "torch uses", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads", ""
    yield "native uses", _native_use(), ""


def _native_use() -> str:
    from antiphon.engine.errors import InputError
    from antiphon.kernels import native

    if native.available() is not None:
        return "nothing: see operations"
    try:
        isa = native.isa()
    except ValueError as error:
        raise InputError(str(error)) from error
    there = ", ".join(native.supported_isas())
    return f"{isa} ({native.ISA_VARIABLE} can ask for {there}), {native.num_threads()} threads"


def _operation_lines() -> Iterator[tuple[str, str, str]]:
    import torch

    from antiphon.kernels.ops import KernelContext
    from antiphon.kernels.registry import report
    from antiphon.precision import Precision, choose_precision

    wide, narrow, int8 = torch.float32, torch.bfloat16, torch.int8
    default = choose_precision("auto", "none", "auto")
    for dtypes in (
        (wide, wide, wide),
        (wide, narrow, narrow),
        (wide, int8, narrow),
        (wide, int8, int8),
        (narrow, narrow, narrow),
    ):
        precision = Precision(*dtypes)
        context = KernelContext("cpu", *dtypes, head_dim=64)
        yield f"in {precision}" + (" (the default here)" if precision == default else ""), "", "bold"
        for operation in report(context):
            yield from _candidate_lines(operation)


def _candidate_lines(operation: OperationReport) -> Iterator[tuple[str, str, str]]:
    serving = [name for name, serves, _ in operation.candidates if serves]
    others = f"   (then {', '.join(serving[1:])})" if serving[1:] else ""
    yield operation.operation, (serving[0] if serving else "nobody") + others, "green" if serving else "red"
    for name, serves, reason in operation.candidates:
        if not serves:
            yield "", f"  not {name}: {reason}", ""


def _model_lines() -> Iterator[tuple[str, str, str]]:
    from antiphon.engine.cache_folder import models_folder
    from antiphon.engine.embedded_models import EMBEDDED_MODELS
    from antiphon.engine.fetch import is_fetched

    yield "folder", str(models_folder()), ""
    for name in EMBEDDED_MODELS:
        yield name, "fetched" if is_fetched(name) else f"not fetched: antiphon models fetch {name}", ""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
