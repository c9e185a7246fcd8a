"""The committed stubs describe the native module that is installed."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def test_stubs_are_in_step() -> None:
    pytest.importorskip("pybind11_stubgen", reason="pip install pybind11-stubgen")
    script = ROOT / "cmake" / "native_stubs.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    committed = (ROOT / "python" / "tradewind" / "_native.pyi").read_text()
    assert done.stdout == committed, "the native module changed; run: make stubs"
