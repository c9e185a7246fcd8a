"""The command line: what it prints where, its exit codes, and that it needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tradewind
from tradewind.launch.cli import main
from tradewind.track import Run


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def run_module(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tradewind", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    with Run.open(tmp_path / "run", config={"lr": 0.5}) as run:
        for step in range(1, 4):
            run.log(step, {"loss": 1.0 / step, "bad": float("nan")})
    return tmp_path / "run"


@pytest.fixture
def poisoned(tmp_path: Path) -> dict[str, str]:
    """An environment whose torch is broken, found before any other."""
    package = tmp_path / "poison" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('poisoned torch')")
    paths = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@pytest.mark.parametrize("command", [(), ("report",), ("doctor",)])
def test_help_has_an_example(command: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        result = invoke(*command, flag)
        assert result.exit_code == 0
        assert "Example:\n" in result.stdout and "  tradewind " in result.stdout


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"tradewind {tradewind.__version__}\n")


def test_report_prints_the_path(run_path: Path) -> None:
    result = invoke("report", run_path)
    assert (result.exit_code, result.stdout) == (0, f"{run_path / 'report.html'}\n")
    assert (run_path / "report.html").read_text().startswith("<!doctype html>")


def test_report_as_json(run_path: Path, tmp_path: Path) -> None:
    result = invoke("report", run_path, "--json", "--output", tmp_path / "page.html")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["report"] == str(tmp_path / "page.html") and Path(document["report"]).exists()
    assert (document["status"], document["steps"]) == ("finished", 3)
    assert document["last"] == {"loss": 1.0 / 3, "bad": "NaN"}
    assert document["attempts"][0]["config"] == {"lr": 0.5}
    assert not (run_path / "report.html").exists()


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_no_run_is_bad_usage(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for flags in ([], ["--json"]):
        result = invoke("report", tmp_path / name, *flags)
        assert result.exit_code == 2
        assert result.stdout == "" and "expected a run directory" in result.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.parametrize(
    "arguments", [("report",), ("report", "a", "b"), ("bogus",), ("doctor", "--bogus")]
)
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr


def test_damaged_metrics_are_a_failure(run_path: Path) -> None:
    (run_path / "metrics" / "000002.jsonl").write_text("{")
    result = invoke("report", run_path)
    assert result.exit_code == 1 and "000002.jsonl" in result.stderr and result.stdout == ""


def test_a_page_that_cannot_be_written_is_a_failure(run_path: Path, tmp_path: Path) -> None:
    result = invoke("report", run_path, "--output", tmp_path / "no" / "page.html")
    assert result.exit_code == 1 and "page.html" in result.stderr
    result = invoke("report", run_path, "--output", tmp_path)
    assert result.exit_code == 2 and "is a directory" in result.stderr


def test_doctor_with_a_command_is_not_built(capfd: Any) -> None:
    for arguments in (("--", "python", "train.py", "--json"), ("python",)):
        result = invoke("doctor", *arguments)
        assert result.exit_code == 2 and result.stdout == ""
        assert "cannot watch a command yet" in result.stderr


def test_doctor_as_json_is_one_document() -> None:
    done = run_module("doctor", "--json")
    assert done.returncode == 0
    titles = [finding["title"] for finding in json.loads(done.stdout)["findings"]]
    assert titles[:3] == ["Python", "torch", "native module"]


def test_doctor_for_people() -> None:
    done = run_module("doctor", COLUMNS="200")
    assert done.returncode == 0 and "looking at this machine" in done.stderr
    for word in ("Python", "native module", "vector instructions", "shared memory"):
        assert word in done.stdout


def test_it_works_with_a_broken_torch(run_path: Path, poisoned: dict[str, str]) -> None:
    code = "import torch"
    broken = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, **poisoned}
    )
    assert broken.returncode == 1  # the poison works
    assert "Example:" in run_module("--help", **poisoned).stdout
    assert run_module("--version", **poisoned).returncode == 0
    done = run_module("report", run_path, **poisoned)
    assert done.returncode == 0, done.stderr
    done = run_module("doctor", "--json", **poisoned)
    assert done.returncode == 0, done.stderr
    findings = {each["title"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["torch"]["status"] == "missing"
    assert "RuntimeError: poisoned torch" in findings["torch"]["found"]
    assert findings["disk"]["found"]


def test_the_launch_room_loads_nothing_heavy() -> None:
    code = """
import sys
from tradewind.launch.cli import main
try:
    main(["--help"], prog_name="tradewind")
except SystemExit as end:
    assert not end.code
heavy = {"torch", "numpy", "matplotlib", "tensorboard", "rich", "sqlite3"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
