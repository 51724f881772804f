"""The rules of shared/STYLE.md and DESIGN.md that ruff does not know, read from the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_FOLDERS = ("kernels", "engine", "scheduler", "src", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Each of these runs code from data, or changes a default for every engine in the process.
BANNED_MODULES = frozenset({"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
BANNED_CALLS = frozenset({"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"})
BANNED_ATTRIBUTES = frozenset({"set_default_device", "set_default_dtype", "set_default_tensor_type"})
MUTABLE_CALLS = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"})
MUTABLE_DISPLAYS = (ast.List, ast.Set, ast.ListComp, ast.SetComp)
MUTATORS = frozenset({"update", "setdefault", "pop", "popitem", "clear", "add", "append", "extend", "remove", "insert"})


def python_files(*folders: str) -> list[Path]:
    """Each file once: the links in src/antiphon lead to folders that are read by their own names."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.resolve() == path)


def dangerous(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Whatever unpickles, evaluates, runs remote code, or switches a process-wide default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            for name in modules:
                if name.split(".")[0] in BANNED_MODULES:
                    yield node.lineno, f"import of {name}"
            if modules == ["torch"] and isinstance(node, ast.ImportFrom) and "load" in names:
                yield node.lineno, "import of torch.load"
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in BANNED_CALLS:
                yield node.lineno, f"call of {ast.unparse(node.func)}"
            for keyword in node.keywords:
                trusted = keyword.arg == "trust_remote_code"
                if trusted and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                    yield node.lineno, "trust_remote_code that is not False"
        elif isinstance(node, ast.Attribute) and node.attr in BANNED_ATTRIBUTES:
            yield node.lineno, node.attr


def mutated_names(tree: ast.AST) -> set[str]:
    """Names that some statement of the module changes in place: `x[k] = v`, `del x[k]`, `x.update(…)`, `x |= …`."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets += [target.value for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            targets.append(node.target.value if isinstance(node.target, ast.Subscript) else node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets.append(node.func.value)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def module_state(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Mutable values bound at module level. A constant dict (CAPITALS, changed nowhere) is let pass."""
    changed = mutated_names(tree)
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [ast.unparse(target) for target in targets]
        called = ast.unparse(node.value.func).split(".")[-1] if isinstance(node.value, ast.Call) else ""
        if isinstance(node.value, ast.Dict | ast.DictComp):
            if not all(name.isupper() and name not in changed for name in names):
                yield node.lineno, f"mutable module state {', '.join(names)}"
        elif (isinstance(node.value, MUTABLE_DISPLAYS) or called in MUTABLE_CALLS) and names != ["__all__"]:
            yield node.lineno, f"mutable module state {', '.join(names)}"
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield inner.lineno, f"global {', '.join(inner.names)}"


def long_functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES} are allowed"


def faults(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [*dangerous(tree), *module_state(tree), *long_functions(tree)]
    return [f"{line}: {what}" for line, what in sorted(found)]


def test_sources_keep_the_rules() -> None:
    files = python_files(*SOURCE_FOLDERS)
    assert len(files) > 10
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in files for fault in faults(path.read_text())]
    assert not found, "\n".join(found)


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files(*SOURCE_FOLDERS, "tests")}
    found = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines > MAX_FILE_LINES]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=trust)",
        "import yaml\nyaml.load(text)",
        "import torch\ntorch.set_default_device('cuda')",
        "import torch\ntorch.set_default_dtype(torch.bfloat16)",
        "cache = {}",
        "CACHE = {}\ndef f():\n    CACHE['a'] = 1",
        "SEEN = set()",
        "NAMES: list[str] = []",
        "def f():\n    global state\n    state = 1",
        "def f():\n" + "    x = 1\n" * 60,
    ],
)
def test_the_check_notices(source: str) -> None:
    assert faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "NAMES = ('a', 'b')",
        "_TABLE = {'a': 1}\ndef f():\n    return _TABLE['a']",
        "f(trust_remote_code=False)",
        "model.eval()",
        "def f():\n    found = {}\n    found['a'] = 1",
        "def f():\n" + "    x = 1\n" * 59,
    ],
)
def test_the_check_lets_good_code_pass(source: str) -> None:
    assert not faults(source)
