"""The real process, killed by SIGKILL at every write, sync, rename and removal that it makes, and
with calls that the kernel refuses, by strace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint.crash.checkpointer_saver import CheckpointerSaver
from checkpoint.crash.crash_states import EXHAUSTIVE, fast_folder
from checkpoint.crash.savers import MakeSaver, PlainSaver, payload
from checkpoint.crash.saving_processes import KINDS, SavingProcesses

from tradewind._core import native

MAKES: dict[str, MakeSaver] = dict(zip(KINDS, (PlainSaver, CheckpointerSaver), strict=True))
WRITES, SYNCS = "?pwrite64,?pwritev,?ftruncate", "?fsync,?fdatasync"
NAMES = "?rename,?renameat,?renameat2"
REMOVALS = "?unlink,?unlinkat,?rmdir"
CREATIONS = "?mkdir,?mkdirat"
KILLS = (WRITES, SYNCS, NAMES, REMOVALS, CREATIONS)
ERRORS = [(SYNCS, "EIO"), (WRITES, "ENOSPC"), (NAMES, "EDQUOT"), (CREATIONS, "ENOSPC")]
COUNT = 4
_MAX_CALLS = 300
_DEADLINE_S = 120


def _refusal() -> str:
    """Why strace cannot be used here; empty when it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (scripts/setup.sh test installs it)"
    command = ["strace", "-qq", "-o", os.devnull, "-e", "inject=?fsync:error=EIO", "true"]
    tried = subprocess.run(
        command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    return "" if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.strip()}"


REFUSAL = _refusal()
pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)


@pytest.fixture(scope="module")
def processes() -> Iterator[SavingProcesses]:
    program = SavingProcesses()
    yield program
    program.close()


def _run(
    processes: SavingProcesses, kind: str, path: Path, injection: str, count: int
) -> tuple[list[int], list[str], int]:
    """A process that saves steps 1 to `count`, with `injection` of strace."""
    pid = processes.start(kind, path, 1, count)
    calls = injection.partition(":")[0]
    command = ["strace", "-f", "-o", os.devnull, "-p", str(pid)]
    command += ["-e", f"trace={calls}", "-e", f"inject={injection}"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    processes.go()
    try:
        assert "attached" in said, said
        return processes.finish()
    finally:
        tracer.communicate(timeout=_DEADLINE_S)


def _check(make: MakeSaver, path: Path, saved: list[int], what: str, count: int) -> None:
    """What is restored, and that the next process can save."""
    saver = make(path, native.posix_env())
    restored = saver.restore()
    if restored is None:
        assert not saved, what
    else:
        assert max(saved, default=0) <= restored[0] <= count, what
        assert restored[1] == payload(restored[0]), what
    saver.save(count + 1)
    assert saver.restore() == (count + 1, payload(count + 1)), what
    saver.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_call(
    kind: str, processes: SavingProcesses, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_kills: dict[str, int] = {}
    # The checkpointer's threads each count for themselves.
    stride = 1 if EXHAUSTIVE or kind == "plain" else 2
    for calls in KILLS:
        for number in range(1, _MAX_CALLS, stride):
            path = folder / "checkpoints"
            injection = f"{calls}:signal=SIGKILL:when={number}"
            saved, failed, status = _run(processes, kind, path, injection, COUNT)
            assert not failed, f"{injection}: {failed}"
            if status == 0:
                assert saved == list(range(1, COUNT + 1))
                shutil.rmtree(path)
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            _check(MAKES[kind], path, saved, injection, COUNT)
            shutil.rmtree(path)
            num_kills[calls] = num_kills.get(calls, 0) + 1
    assert len(num_kills) == len(KILLS) and sum(num_kills.values()) > 30 // stride
    with capsys.disabled():
        print(f"\n  SIGKILL, {kind}: {sum(num_kills.values())} processes killed")


@pytest.mark.parametrize("kind", KINDS)
def test_terminated_in_a_save(kind: str, processes: SavingProcesses, folder: Path) -> None:
    """SIGTERM without a handler, as a place sends it to whoever does not listen."""
    for number in range(2, 20, 4):
        path = folder / f"checkpoints-{number}"
        injection = f"{SYNCS}:signal=SIGTERM:when={number}"
        saved, _, status = _run(processes, kind, path, injection, COUNT)
        assert status == 0 or os.WTERMSIG(status) == signal.SIGTERM
        _check(MAKES[kind], path, saved, injection, COUNT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("calls", "error"), ERRORS)
def test_a_call_that_the_kernel_refuses(
    calls: str, error: str, kind: str, processes: SavingProcesses, folder: Path
) -> None:
    count = 8  # strace counts the calls of each thread, and of each system call, for themselves
    for number in (1, 2, 5, 9) if not EXHAUSTIVE else range(1, 40):
        path = folder / f"checkpoints-{number}"
        injection = f"{calls}:error={error}:when={number}"
        saved, failed, status = _run(processes, kind, path, injection, count)
        assert status == 0, injection
        assert saved and len(saved) + len(failed) == count, (injection, failed)
        assert all(name.endswith("Error") for name in failed), failed
        _check(MAKES[kind], path, saved, injection, count)
