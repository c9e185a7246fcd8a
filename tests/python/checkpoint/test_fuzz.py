"""Hostile manifests and headers: the committed corpus always, new inputs where atheris is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FUZZER = Path(__file__).parents[2] / "fuzz" / "checkpoint_format.py"
CORPUS = sorted((FUZZER.parent / "corpus").iterdir())


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_format", FUZZER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_corpus_is_small_and_of_every_kind() -> None:
    assert 20 <= len(CORPUS) < 100
    assert sum(path.stat().st_size for path in CORPUS) < 200_000
    assert {path.read_bytes()[:1] for path in CORPUS} == {b"m", b"s", b"h"}


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_corpus_is_read_or_refused(path: Path, fuzzer: ModuleType) -> None:
    # Those that end well say so by name: a reader that refuses everything would pass otherwise.
    expected = "read" if path.name.startswith("read-") else "refused"
    assert fuzzer.check(path.read_bytes()) == expected


def test_new_inputs_are_read_or_refused(tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed; install it with: pip install 'tradewind[fuzz]'")
    found = tmp_path / "found"
    found.mkdir()
    command = [sys.executable, str(FUZZER), "-max_total_time=20", "-timeout=200"]
    command += ["-rss_limit_mb=8192", f"-artifact_prefix={tmp_path}/", str(found)]
    done = subprocess.run(
        [*command, str(FUZZER.parent / "corpus")],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
    )
    failed = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert done.returncode == 0, (failed, done.stderr[-4000:])
    begun = re.search(r"INITED cov: ([0-9]+)", done.stderr)
    assert begun is not None and "DONE" in done.stderr, done.stderr[-4000:]
    assert int(begun[1]) > 100  # it follows what the readers do, not the harness alone
