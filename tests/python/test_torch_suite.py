"""PyTorch's own optimizer suite over our optimizers, where its file can be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "torch_suite" / "run.py"


def test_pytorchs_own_suite_passes() -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), "--quick"], capture_output=True, text=True, timeout=600
    )
    if done.stdout.startswith("SKIPPED: "):
        pytest.skip(done.stdout.removeprefix("SKIPPED: ").strip())
    assert done.returncode == 0, (done.stderr + done.stdout)[-8000:]
