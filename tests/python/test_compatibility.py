"""docs/compatibility.md publishes what the suite of PyTorch's tests skips."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "torch_suite" / "run.py"


def test_the_published_skips_are_in_step(tmp_path: Path) -> None:
    published = ROOT / "docs" / "compatibility.md"
    copy = Path(shutil.copy(published, tmp_path))
    done = subprocess.run(
        [sys.executable, str(RUN), "--write-docs", str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert published.read_text() == copy.read_text(), (
        f"skips.py changed; run: python {RUN.relative_to(ROOT)} --write-docs"
    )
