"""`import tradewind` is lazy, and the native module refuses a torch it was not built for."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import tradewind as tw


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_import_loads_neither_torch_nor_the_native_module() -> None:
    code = """
import sys, tradewind
heavy = {"torch", "numpy", "tradewind._native", "matplotlib", "rich"}
first = heavy & set(sys.modules)
tradewind.__version__, dir(tradewind), tradewind.place
print(sorted(first), sorted(heavy & set(sys.modules)))
"""
    done = run(code)
    assert done.stdout.strip() == "[] []", done.stderr


@pytest.mark.parametrize("name", tw.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(tw, name) is not None
    assert name in dir(tw)


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(tw, "Watchdogg")
    with pytest.raises(AttributeError, match="module 'tradewind' has no attribute 'Watchdogg'"):
        tw.Watchdogg  # noqa: B018


def test_another_minor_of_torch_is_one_clear_error() -> None:
    from tradewind._core import check_torch

    check_torch("2.13.7+cu130", "2.13.0+cpu")
    with pytest.raises(ImportError) as caught:
        check_torch("2.12.1", "2.13.0+cpu")
    message = str(caught.value)
    for part in ("2.12.1", "2.13.0+cpu", "pip install --no-build-isolation", "torch==2.13.0"):
        assert part in message


def test_the_error_comes_before_the_native_module_loads(tmp_path: pathlib.Path) -> None:
    code = """
import sys, torch
torch.__version__ = "2.9.0"
import tradewind
try:
    tradewind.Engine
except ImportError as error:
    assert "tradewind._native" not in sys.modules
    print(error)
"""
    done = run(code)
    assert "built against torch" in done.stdout and "2.9.0 is installed" in done.stdout, done.stderr


def test_one_openmp_runtime_in_the_process() -> None:
    code = """
import tradewind.optim
libraries = {line.split()[-1] for line in open("/proc/self/maps")}
print(len([name for name in libraries if "libgomp" in name or "libomp" in name]))
"""
    assert run(code).stdout.strip() == "1"


def test_isa_is_chosen_by_the_environment() -> None:
    code = "from tradewind._core import native; print(native.isa())"
    assert run(code, TRADEWIND_ISA="baseline").stdout.strip() == "baseline"
    wrong = run(code, TRADEWIND_ISA="sse9")
    assert "ValueError: TRADEWIND_ISA: expected one of baseline" in wrong.stderr
    assert "got 'sse9'" in wrong.stderr


def test_free_threaded_python_is_refused_by_name() -> None:
    code = """
import sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
import tradewind
try:
    tradewind.Engine
except ImportError as error:
    assert "tradewind._native" not in sys.modules
    print(error)
"""
    assert "free-threaded Python is not supported" in run(code).stdout


def test_import_takes_less_than_a_tenth_of_a_second() -> None:
    """The one promise about time that is a test: best of five, some twenty times the measured."""
    code = "import time; a = time.perf_counter(); import tradewind; print(time.perf_counter() - a)"
    assert min(float(run(code).stdout) for _ in range(5)) < 0.1
