"""One live owner per run directory, within a process and between processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import track.processes as processes

from tradewind.track import Run, RunLockedError, open_metrics, read_run
from tradewind.track.lock import RunLock, is_owned

OWNER = """
import sys
from tradewind.track import Run
with Run.open(sys.argv[1], config={}):
    print("owns")
    sys.stdin.readline()
"""
CONTENDER = """
import sys
from tradewind.track import Run, RunLockedError
sys.stdin.readline()
try:
    run = Run.open(sys.argv[1], config={})
except RunLockedError as error:
    print("refused", error)
else:
    print("owns", flush=True)
    sys.stdin.readline()
"""


def test_another_process_is_refused_by_name(tmp_path: Path) -> None:
    owner = processes.start(OWNER, tmp_path)
    assert processes.next_line(owner) == "owns"
    owners = json.loads((tmp_path / ".lock").read_text())
    with pytest.raises(RunLockedError) as caught:
        Run.open(tmp_path, config={})
    message = str(caught.value)
    assert f"pid {owner.pid}" in message and "another process" in message
    assert owners["host"] in message and owners["started"] in message
    record = json.loads((tmp_path / "run.json").read_text())
    assert len(record["attempts"]) == 1 and record["attempts"][0]["started"] == owners["started"]
    assert processes.finish_with_line(owner) == 0
    Run.open(tmp_path, config={}).close()


def test_of_two_that_race_one_wins(tmp_path: Path) -> None:
    contenders = [processes.start(CONTENDER, tmp_path) for _ in range(2)]
    for each in contenders:
        processes.send_line(each)
    said = [processes.next_line(each).split()[0] for each in contenders]
    assert sorted(said) == ["owns", "refused"]
    for each in contenders:
        each.kill()
        processes.finish(each)


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    owner = processes.start(OWNER, tmp_path)
    processes.next_line(owner)
    assert is_owned(tmp_path)
    owner.send_signal(signal.SIGKILL)
    processes.finish(owner)
    assert not is_owned(tmp_path)
    Run.open(tmp_path, config={}).close()


def test_two_live_runs_of_one_process_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with Run.open(tmp_path / "run", config={}):
        for same in (tmp_path / "run", tmp_path / "link", tmp_path / "link" / ".." / "run"):
            with pytest.raises(RunLockedError, match=f"this process.*pid {os.getpid()}"):
                Run.open(same, config={})
        # The refusals must not have dropped the lock (POSIX drops it with any closed descriptor).
        code = "import sys\nfrom tradewind.track.lock import *\nfrom pathlib import Path\n"
        code += "print(is_owned(Path(sys.argv[1])))"
        ask = processes.start(code, tmp_path / "run")
        assert processes.finish(ask)[1].strip() == "True"
    Run.open(tmp_path / "run", config={}).close()


def test_readers_in_the_owners_process_keep_its_lock(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        run.log(1, {"loss": 1.0})
        run.flush()
        for _ in range(3):
            assert read_run(tmp_path).status == "running"
            open_metrics(tmp_path).close()
        contender = processes.start(CONTENDER, tmp_path)
        processes.send_line(contender)
        assert processes.next_line(contender).startswith("refused")
        processes.finish(contender)


def test_asking_never_refuses_an_opener(tmp_path: Path) -> None:
    tmp_path.joinpath(".lock").touch()
    holder = os.open(tmp_path / ".lock", os.O_RDONLY)
    code = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.lockf(fd, fcntl.LOCK_SH)
print("asking")
sys.stdin.readline()
"""
    asking = processes.start(code, tmp_path / ".lock")
    assert processes.next_line(asking) == "asking"
    timer = threading.Timer(0.03, processes.send_line, [asking])
    timer.start()
    RunLock(tmp_path, "now").release()
    timer.join()
    processes.finish(asking)
    os.close(holder)


def test_a_forked_child_may_not_take_the_parents_directory(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                Run.open(tmp_path, config={})
            except RunLockedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_disk_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match="has no locks"):
        run = Run.open(tmp_path, config={})
    run.close()


def test_other_lock_errors_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Run.open(tmp_path, config={})
    monkeypatch.undo()
    Run.open(tmp_path, config={}).close()


def test_a_copied_directory_has_no_owner(tmp_path: Path) -> None:
    import shutil

    with Run.open(tmp_path / "run", config={}):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert read_run(tmp_path / "copy").status == "ended without closing"
        (tmp_path / "copy" / ".lock").unlink()
        assert read_run(tmp_path / "copy").status == "ended without closing"
