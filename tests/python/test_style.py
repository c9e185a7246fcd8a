"""Formatters, linter and type checker find nothing. What they can repair: make format."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPP_FOLDERS = ("csrc", "tests/cpp")
CPP_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
PYTHON_FOLDERS = ("python", "tests", "examples", "benchmarks", "cmake")
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def check(tool: str, *arguments: str, **environment: str) -> None:
    """Run a tool in the checkout; skip where it is missing, fail with its output where it fails."""
    program = shutil.which(tool, path=SEARCH_PATH)
    if program is None:
        pytest.skip(f"{tool} was not found; install it with: pip install {tool}")
    done = subprocess.run(
        [program, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def python_folders() -> list[str]:
    return [folder for folder in PYTHON_FOLDERS if any((ROOT / folder).rglob("*.py"))]


def test_cpp_is_formatted() -> None:
    files = [
        str(path.relative_to(ROOT))
        for folder in CPP_FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in CPP_SUFFIXES
    ]
    assert files
    check("clang-format", "--dry-run", "--Werror", *files)


def test_python_is_formatted() -> None:
    check("ruff", "format", "--check", *python_folders())


def test_python_is_linted() -> None:
    check("ruff", "check", *python_folders())


def test_the_package_is_strictly_typed() -> None:
    # The sources of this checkout, whatever is installed.
    check("mypy", "--strict", MYPYPATH=str(ROOT / "python"))
