"""Packaging: src/antiphon with its links to the top-level folders, and the optional C++ extension.

The extension is optional on purpose: without a C++ compiler the install succeeds, torch serves every operation, and
`antiphon doctor` says what is missing (kernels/native.py).
"""

from __future__ import annotations

import platform
from pathlib import Path

import pybind11
from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

COMPILE_FLAGS = ["-O3", "-std=c++17", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]


class OptionalBuildExt(build_ext):
    """Builds the extension; a failure of any kind is told and leaves an install without it."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # any failure here must leave a working install
            self.warn(
                f"antiphon's C++ kernels were not built ({type(error).__name__}: {error}). Antiphon works without "
                "them, slower. To have them, install g++ 11 or newer and install Antiphon again."
            )


def native_extension() -> Extension:
    """`antiphon.kernels._native`: all of csrc, with no flag that ties it to the machine it was built on."""
    sources = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
    headers = sorted(str(path) for path in Path("csrc").rglob("*.h"))
    return Extension(
        "antiphon.kernels._native",
        sources=sources,
        depends=headers,
        include_dirs=[pybind11.get_include(), "csrc"],
        extra_compile_args=COMPILE_FLAGS,
        extra_link_args=["-pthread", "-Wl,--strip-debug"],
        language="c++",
        optional=True,
    )


setup(
    packages=find_namespace_packages("src", include=["antiphon*"]),
    package_data={"": ["*.pyi", "py.typed"]},
    exclude_package_data={"": ["*.cpp", "*.h"]},
    ext_modules=[native_extension()] if platform.system() == "Linux" else [],
    cmdclass={"build_ext": OptionalBuildExt},
)
