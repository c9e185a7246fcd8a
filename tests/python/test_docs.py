"""The pages under docs/: their Python blocks run and their links lead somewhere."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links(page: pathlib.Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


# Pages whose blocks are for files of the reader's own are followed by a test of their own.
FOLLOWED_ELSEWHERE = ("add-an-update-rule.md",)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in FOLLOWED_ELSEWHERE], ids=lambda p: p.name
)
def test_python_blocks_run(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    if not blocks:
        return
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
