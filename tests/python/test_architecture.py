"""The arrows of the design: the trees have no others, and the checks find planted ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import cpp_arrows
import pytest
import python_arrows

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "tradewind"

IGNORED = shutil.ignore_patterns("__pycache__", "*.so")


def test_csrc_has_only_the_designs_arrows() -> None:
    assert cpp_arrows.violations(CSRC) == []


def test_the_package_has_only_the_designs_arrows() -> None:
    assert python_arrows.violations(PACKAGE) == []


def plant(tree: Path, copy: Path, file: str, line: str) -> Path:
    """A copy of `tree` with `line` put at the top of `file`, which is made where it is missing."""
    shutil.copytree(tree, copy, ignore=IGNORED)
    planted = copy / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    before = planted.read_text() if planted.exists() else ""
    planted.write_text(f"{line}\n{before}")
    return copy


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("base/error.h", '#include "arena/layout.h"', "base may not include arena"),
        ("arena/layout.cpp", '#include "step/kernels.h"', "arena may not include step"),
        ("step/rules/sgd.h", '#include "share/plan.h"', "step may not include share"),
        (
            "step/kernels_impl.h",
            '#include "checkpoint/format.h"',
            "step may not include checkpoint",
        ),
        ("step/cuda/adamw.cu", '#include "watch/rules.h"', "step may not include watch"),
        ("share/plan.cpp", '#include "step/sweep.h"', "share may not include step"),
        ("checkpoint/writer.h", '#include "share/plan.h"', "checkpoint may not include share"),
        ("watch/rules.cpp", '#include "checkpoint/format.h"', "watch may not include checkpoint"),
        ("torch/slot_tensor.h", '#include "bindings/register.h"', "torch may not include bindings"),
        ("step/sweep.cpp", '#include "torch/parallel.h"', "step may not include torch"),
        ("step/sweep.cpp", "#include <torch/parallel.h>", "step may not include torch"),
        ("step/sweep.cpp", "  #  include <step/../share/plan.h>", "expected room/file.h"),
        ("step/sweep.cpp", '#include "../share/plan.h"', "expected room/file.h"),
        ("step/sweep.cpp", '#include "kernels.h"', "expected room/file.h"),
        ("step/sweep.cpp", "#include SOME_HEADER", "no macro"),
        ("arena/memory.h", "#include <torch/torch.h>", "not in arena"),
        ("arena/memory.h", "#include <ATen/core/Tensor.h>", "not in arena"),
        ("step/sweep.h", '#include "ATen/core/Tensor.h"', "not in step"),
        ("step/cuda/probe.cu", "#include <c10/cuda/CUDAStream.h>", "not in step"),
        ("base/error.h", "#include <pybind11/pybind11.h>", "not in base"),
        ("torch/slot_tensor.h", "#include <pybind11/pybind11.h>", "not in torch"),
        ("arena/dtype.h", "#include <Python.h>", "not in arena"),
        ("step/sweep.cpp", "#include <cuda_runtime.h>", "CUDA's headers"),
        ("torch/hot_measure.cpp", "#include <ATen/Parallel.h>", "OpenMP belongs"),
        ("step/sweep.cpp", "#include <omp.h>", "OpenMP belongs"),
        ("step/sweep.cpp", "#pragma omp parallel for", "OpenMP belongs"),
        ("torch/hot_measure.cpp", "int n = omp_get_max_threads();", "OpenMP belongs"),
        ("comms/ring.h", "", "comms: not a room of the table"),
    ],
)
def test_a_planted_include_is_found(file: str, line: str, complaint: str, tmp_path: Path) -> None:
    found = cpp_arrows.violations(plant(CSRC, tmp_path / "csrc", file, line))
    assert len(found) == 1 and complaint in found[0], found
    assert found[0].startswith(file if "/" in found[0] else "comms")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("step/sweep.cpp", '// #include "torch/parallel.h"'),
        ("step/sweep.cpp", "/* once:\n#include <torch/torch.h>\n*/"),
        ("step/cuda/probe.cu", "#include <cuda_fp16.h>"),
        ("share/plan.cpp", '#include "arena/layout.h"'),
        ("torch/hooks.cpp", '#include "share/plan.h"'),
        ("torch/parallel.cpp", "#include <omp.h>"),
    ],
)
def test_an_allowed_include_is_not(file: str, line: str, tmp_path: Path) -> None:
    assert cpp_arrows.violations(plant(CSRC, tmp_path / "csrc", file, line)) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("optim/adamw.py", "from tradewind.share import x", "optim may not import share"),
        ("optim/adamw.py", "from tradewind import watch", "optim may not import watch"),
        ("optim/adamw.py", "from ..engine import Engine", "optim may not import engine"),
        (
            "optim/adamw.py",
            "def f():\n    import tradewind.checkpoint",
            "may not import checkpoint",
        ),
        ("share/wrap.py", "import importlib\nimportlib.import_module('tradewind.optim')", "optim"),
        ("share/wrap.py", "import tradewind as tw\ntw.optim", "share may not import optim"),
        ("checkpoint.py", "if TYPE_CHECKING:\n    from .optim import AdamW", "not import optim"),
        ("watch/rules.py", "from tradewind.engine.loop import run", "watch may not import engine"),
        ("optim/adamw.py", "from tradewind import Engine", "optim may not import Engine"),
        ("meter.py", "from tradewind.optim import AdamW", "meter may not import optim"),
        ("track/run.py", "from tradewind import _native", "track may not import _native"),
        ("optim/adamw.py", "from tradewind._native import x", "optim may not import _native"),
        ("engine/loop.py", "def f():\n    from tradewind import _native", "not import _native"),
        ("engine/loop.py", "import tradewind.launch.cli", "engine may not import launch"),
        ("engine/loop.py", "from tradewind.report import x", "report only lazily"),
        ("launch/spec.py", "def f():\n    import torch", "launch imports torch"),
        ("launch/cli.py", "from tradewind.report import x", "report only lazily"),
        ("launch/cli.py", "def f():\n    from tradewind import engine", "may not import engine"),
        ("place.py", "import torch", "place imports torch"),
        ("track/media.py", "import torch.nn as nn", "track imports torch"),
        ("report/page.py", "try:\n    from torch import nn\nexcept ImportError: ...", "torch"),
        ("progress.py", "import torch", "progress imports torch"),
        ("__init__.py", "import torch", "__init__ imports torch"),
        ("__main__.py", "def f():\n    import torch", "__main__ imports torch"),
        ("novel.py", "", "novel: not a module of the table"),
        ("novel/__init__.py", "", "novel: not a module of the table"),
    ],
)
def test_a_planted_import_is_found(file: str, line: str, complaint: str, tmp_path: Path) -> None:
    copy = plant(PACKAGE, tmp_path / "tradewind", file, line)
    found = [entry for entry in python_arrows.violations(copy) if "by way of" not in entry]
    assert len(found) == 1 and complaint in found[0], found


def test_torch_is_found_by_way_of_another_module(tmp_path: Path) -> None:
    """No arrow of `track` is wrong, but loading it loads torch."""
    copy = plant(PACKAGE, tmp_path / "tradewind", "machine.py", "import torch")
    found = python_arrows.violations(copy)
    assert any(
        line.startswith("track/") and "by way of tradewind.machine" in line for line in found
    )


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("place.py", "def f():\n    import torch"),
        ("track/media.py", "if TYPE_CHECKING:\n    import torch"),
        ("launch/cli.py", "def f():\n    from tradewind import report, doctor, track, place"),
        ("launch/cli.py", "from tradewind.place import place"),
        ("engine/engine.py", "from tradewind import share, checkpoint, watch"),
        ("share/wrap.py", "from tradewind._core import native\nfrom tradewind.share import codec"),
    ],
)
def test_an_allowed_import_is_not(file: str, line: str, tmp_path: Path) -> None:
    assert python_arrows.violations(plant(PACKAGE, tmp_path / "tradewind", file, line)) == []
