"""What an install from a wheel gets: real files, the compiled kernels where there is a compiler, and nothing else."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "antiphon"
COPIED = ("pyproject.toml", "setup.py", "README.md", "csrc", "engine", "kernels", "scheduler", "src")
IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")


def build_wheel(folder: Path, *, compiler: str | None = None) -> tuple[Path, str]:
    """The wheel of a copy of the sources, and what the build said. Nothing is written into the checkout."""
    source = folder / "source"
    source.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=IGNORED)
        else:
            shutil.copy2(ROOT / name, source / name)
    environment = dict(os.environ)
    if compiler is None:
        reuse_extension(source)
    else:
        environment |= {"CC": compiler, "CXX": compiler}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-v"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


def reuse_extension(source: Path) -> None:
    """Puts the extension of this checkout where the build looks first: it compiles anew only what is out of date."""
    built = sorted((ROOT / "kernels").glob(f"_native*{sysconfig.get_config_var('EXT_SUFFIX')}"))
    tag = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    target = source / "build" / tag / "antiphon" / "kernels"
    target.mkdir(parents=True)
    for path in built:
        shutil.copy2(path, target / path.name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))[0]


def test_a_wheel_holds_the_sources_as_real_files_and_nothing_else(wheel: Path) -> None:
    expected = {
        (Path("antiphon") / Path(folder).relative_to(PACKAGE) / name).as_posix(): Path(folder) / name
        for folder, _, names in os.walk(PACKAGE, followlinks=True)
        for name in names
        if name.endswith((".py", ".pyi")) or name == "py.typed"
    }
    assert {"antiphon/kernels/native.py", "antiphon/kernels/_native.pyi", "antiphon/engine/errors.py"} <= set(expected)
    with zipfile.ZipFile(wheel) as archive:
        links = [info.filename for info in archive.infolist() if stat.S_ISLNK(info.external_attr >> 16)]
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith(".so")}
        assert not links
        assert names == set(expected)
        for name, path in expected.items():
            assert archive.read(name) == path.read_bytes(), name


def test_a_wheel_holds_the_compiled_kernels_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "antiphon = antiphon.cli.app:main" in archive.read(entry_points).decode()
    assert compiled == [f"antiphon/kernels/_native{sysconfig.get_config_var('EXT_SUFFIX')}"]


def test_without_a_compiler_the_install_succeeds_and_says_what_is_missing(tmp_path: Path) -> None:
    wheel, said = build_wheel(tmp_path, compiler="/nonexistent/c++")
    assert "kernels were not built" in said
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(installed)
    code = "from antiphon.kernels import native; print(native.__file__, native.available())"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert "install g++" in done.stdout
