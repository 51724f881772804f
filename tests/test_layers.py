"""Imports go down only: antiphon → antiphon.scheduler → antiphon.engine → antiphon.kernels, always by full name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "engine", "scheduler", "front")  # the lowest first
FOLDERS = {"kernels": ROOT / "kernels", "engine": ROOT / "engine", "scheduler": ROOT / "scheduler"}
FRONT = ROOT / "src" / "antiphon"


def sources() -> Iterator[tuple[str, Path]]:
    """Every Python file of the package with its layer."""
    for layer, folder in FOLDERS.items():
        yield from ((layer, path) for path in sorted(folder.rglob("*.py")))
    for path in sorted(FRONT.rglob("*.py")):
        if path.relative_to(FRONT).parts[0] not in FOLDERS:
            yield "front", path


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, at any depth, also by `import_module("…")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield from ((node.lineno, f"{dots}{node.module or ''}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def faults(layer: str, source: str) -> list[str]:
    """What a file of `layer` imports that it may not."""
    found = []
    for line, name in imported_names(ast.parse(source)):
        parts = name.split(".")
        if name.startswith("."):
            found.append(f"{line}: {name} is relative")
        elif parts[0] in FOLDERS:
            found.append(f"{line}: {name} lacks the package's name")
        elif parts[0] == "antiphon":
            target = parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "front"
            if LAYERS.index(target) > LAYERS.index(layer):
                found.append(f"{line}: {name} is above {layer}")
    return found


def test_every_import_goes_down() -> None:
    checked = list(sources())
    assert {layer for layer, _ in checked} >= {"kernels", "engine", "front"}
    found = [
        f"{path.relative_to(ROOT)}:{fault}" for layer, path in checked for fault in faults(layer, path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_lower_folders_are_no_packages() -> None:
    """A bare `kernels` must stay inert: transformers looks for a package of that name (docs/architecture.md)."""
    for name, folder in FOLDERS.items():
        assert not (folder / "__init__.py").exists(), name
        assert (FRONT / name).is_symlink() and (FRONT / name).resolve() == folder, name


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("kernels", "from antiphon.engine.errors import InputError"),
        ("engine", "import antiphon.scheduler.core"),
        ("engine", "from antiphon import scheduler"),
        ("scheduler", "from antiphon.results import Round"),
        ("scheduler", "def f():\n    import antiphon"),
        ("kernels", 'import importlib\nimportlib.import_module("antiphon.engine.config")'),
        ("front", "from . import results"),
        ("front", "from kernels import native"),
    ],
)
def test_the_check_notices(layer: str, source: str) -> None:
    assert faults(layer, source)


def test_the_check_lets_good_imports_pass() -> None:
    source = "import torch\nfrom antiphon.kernels import native\nfrom antiphon.engine.errors import InputError"
    assert not faults("engine", source)
    assert not faults("front", "from antiphon.scheduler.core import Core\nfrom antiphon import results")
