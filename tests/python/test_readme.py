"""The README's code and commands do what it says."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder in which the README's Python blocks have run, in order, as one script."""
    folder = tmp_path_factory.mktemp("readme")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks("python"))],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("runs/readme/report.html")
    return folder


def test_python_blocks_run(readme_folder: pathlib.Path) -> None:
    assert (readme_folder / "runs/readme/report.html").exists()


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("tradewind ")])
def test_command_line_examples_run(command: str, readme_folder: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        cwd=readme_folder,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run([*shlex.split(command), "-n"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_readme_is_known_here() -> None:
    known = ("make ", "tradewind ", "pip install ")
    assert [command for command in commands() if not command.startswith(known)] == []


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
