"""Asking torches that are absent, broken, crashing or hanging."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tradewind.doctor.torch_probe import TorchAnswers, ask_torch


def poison(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Put a package `torch` of that source first on the search path."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))


def test_the_real_torch() -> None:
    answers = ask_torch()
    assert answers.facts["import"]["version"] == torch.__version__
    assert answers.end == "" and answers.trouble("cuda") is None
    assert len(answers.facts["cuda"]["devices"]) == torch.cuda.device_count()


def test_a_torch_that_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    poison(monkeypatch, tmp_path, "raise OSError('libcudart.so.99: cannot open')")
    answers = ask_torch()
    assert answers.trouble("import") == "OSError: libcudart.so.99: cannot open"
    assert not answers.is_absent
    assert answers.trouble("cuda") == answers.trouble("import")


def test_a_torch_that_exits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    poison(monkeypatch, tmp_path, "import os, sys\nprint('noise', file=sys.stderr)\nos._exit(7)")
    assert ask_torch().trouble("import") == "its process ended with exit code 7: noise"


def test_a_torch_that_crashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    poison(monkeypatch, tmp_path, "import os\nos.kill(os.getpid(), 11)")
    assert ask_torch().trouble("import") == "its process was killed by SIGSEGV"


def test_a_torch_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    source = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
    poison(monkeypatch, tmp_path, source + "time.sleep(600)")
    answers = ask_torch(timedelta(seconds=1.5))
    assert answers.trouble("import") == "no answer within 1.5 s"
    deadline = time.monotonic() + 10
    while _is_alive(int(pid_file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(int(pid_file.read_text()))


def test_what_was_reached_before_a_hang_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = """
import time
__version__ = "2.13.0"
class version:
    cuda = "13.0"
def get_num_threads():
    return 4
class cuda:
    class nccl:
        version = staticmethod(lambda: (2, 27, 5))
    is_available = staticmethod(lambda: time.sleep(600))
"""
    poison(monkeypatch, tmp_path, source)
    answers = ask_torch(timedelta(seconds=2))
    assert answers.facts["import"]["built_for_cuda"] == "13.0"
    assert answers.facts["nccl"]["version"] == "2.27.5"
    assert answers.trouble("cuda") == "no answer within 2 s"


def test_a_python_that_cannot_be_started() -> None:
    answers = ask_torch(python="/nowhere/python")
    assert "could not be started" in str(answers.trouble("import"))


def test_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    kept = [each for each in sys.path if not (Path(each) / "torch").exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    answers = ask_torch()
    assert answers.is_absent and "torch" in str(answers.trouble("import"))


def test_noise_on_stdout_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    poison(monkeypatch, tmp_path, "print('{\"stage\": \"import\"}')\nraise ValueError('x')")
    assert ask_torch().trouble("import") == "ValueError: x"


def test_not_asked() -> None:
    assert TorchAnswers().trouble("cuda") == "not asked"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
