"""Two engines on one directory: refused where that can be seen, harmless where it cannot."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import track.processes as processes
from checkpoint.local_commits import SHARD, commit, steps_of

from tradewind._core import native
from tradewind.checkpoint.errors import CheckpointError, DirectoryInUseError, FencedError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import ATTEMPTS

OWNER = """
import os, sys
from tradewind.checkpoint.local_directory import LocalDirectory
directory = LocalDirectory(sys.argv[1])
print("claims", directory.claim(), flush=True)
if sys.argv[2] == "forks" and os.fork() == 0:
    print("child", os.getpid(), flush=True)
    os.read(0, 1)  # outlives its parent, as a loader's worker may
    os._exit(0)
sys.stdin.readline()
directory.close()
"""


class OtherMachine:
    """The file system as it is seen from another machine: without this one's locks."""

    def __init__(self) -> None:
        self._env = native.posix_env()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def lock_file(self, path: str, exclusive: bool) -> Any:
        return native.posix_env().lock_file(path + ".elsewhere", exclusive=True)


def test_a_second_engine_of_the_process_is_refused_by_name(tmp_path: Path) -> None:
    first, second = LocalDirectory(tmp_path / "c"), LocalDirectory(tmp_path / "c")
    commit(first, 1)
    with pytest.raises(DirectoryInUseError, match=f"this process: host .*, pid {os.getpid()},"):
        second.begin(2)
    assert steps_of(second) == [1]
    commit(first, 2)
    first.close()
    assert commit(second, 3).attempt == 2
    second.close()


def test_another_process_is_refused_by_name(tmp_path: Path) -> None:
    owner = processes.start(OWNER, tmp_path / "c", "alone")
    assert processes.next_line(owner) == "claims 1"
    directory = LocalDirectory(tmp_path / "c")
    with pytest.raises(DirectoryInUseError, match=f"another process: host .*, pid {owner.pid},"):
        directory.claim()
    assert sorted(os.listdir(tmp_path / "c" / ATTEMPTS)) == ["000000001", "000000001.accepted"]
    assert processes.finish_with_line(owner) == 0
    assert directory.claim() == 2
    directory.close()


def test_a_killed_owner_does_not_block_nor_does_a_child_that_outlives_it(tmp_path: Path) -> None:
    owner = processes.start(OWNER, tmp_path / "c", "forks")
    assert processes.next_line(owner) == "claims 1"
    child = int(processes.next_line(owner).split()[1])
    owner.kill()
    owner.wait(60)
    directory = LocalDirectory(tmp_path / "c")
    try:
        os.kill(child, 0)  # it is still there
        assert directory.claim() == 2
    finally:
        os.kill(child, signal.SIGKILL)
        processes.finish(owner)
    directory.close()


def test_a_lock_file_left_over_does_not_block(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    directory.claim()
    directory.close()
    facts = {"host": "elsewhere", "pid": os.getpid(), "started": "long ago"}
    (tmp_path / "c" / ".lock").write_text(json.dumps(facts))
    assert directory.claim() == 2
    assert json.loads((tmp_path / "c" / ".lock").read_text())["pid"] == os.getpid()
    directory.close()


def test_a_refused_engine_takes_no_number_and_fences_nobody(tmp_path: Path) -> None:
    owner = LocalDirectory(tmp_path / "c")
    commit(owner, 1)
    for _ in range(3):
        with pytest.raises(DirectoryInUseError):
            LocalDirectory(tmp_path / "c").claim()
    commit(owner, 2)
    owner.close()


def test_a_claim_that_failed_fences_nobody(tmp_path: Path) -> None:
    for index in range(40):
        owner = LocalDirectory(tmp_path / f"c{index}")
        commit(owner, 1)
        env = native.RecordingEnv()
        env.inject(index, error=errno.ENOSPC)
        second = LocalDirectory(tmp_path / f"c{index}", env)
        second._owner = _NoLock()  # type: ignore[assignment]
        has_failed = False
        try:
            second.claim()
        except OSError:
            has_failed = True
        if not has_failed or "000000002.accepted" in os.listdir(tmp_path / f"c{index}" / ATTEMPTS):
            with pytest.raises(FencedError):
                owner.begin(2)
        else:
            assert commit(owner, 2).attempt == 1
        owner.close()
        if not has_failed:
            assert index > 5
            return
    pytest.fail("no claim went through")


class _NoLock:
    """An owner's lock as on a file system without any."""

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass


# --- owners on different machines ---------------------------------------------------------------


def test_the_earlier_owner_is_fenced_and_the_error_names_the_later_one(tmp_path: Path) -> None:
    old = LocalDirectory(tmp_path / "c")
    commit(old, 1)
    begun = old.begin(2)
    old.env.write_file(old.path_of(begun, SHARD), b"late")
    new = LocalDirectory(tmp_path / "c", OtherMachine())
    assert new.claim() == 2
    with pytest.raises(FencedError, match=rf"attempt 2 \(host .*, pid {os.getpid()}, started"):
        old.publish(begun, b"manifest")
    with pytest.raises(FencedError):
        old.begin(3)
    assert old.retain(1) == []
    assert steps_of(new) == steps_of(old) == [1]
    commit(new, 5)
    assert steps_of(old) == [5, 1]
    old.close()
    new.close()


def test_a_commit_behind_the_list_counts_for_nobody(tmp_path: Path) -> None:
    old = LocalDirectory(tmp_path / "c")
    commit(old, 1)
    late = old.begin(2)
    new = LocalDirectory(tmp_path / "c", OtherMachine())
    new.claim()
    # As if the machine had slept between its last look at the claims and the rename.
    os.makedirs(old.path_of(late), exist_ok=True)
    Path(old.path_of(late, SHARD)).write_bytes(b"late")
    Path(old.path_of(late, "manifest.json")).write_bytes(b"late")
    assert steps_of(LocalDirectory(tmp_path / "c")) == [1]
    old.abandon(late)
    assert Path(old.path_of(late, "manifest.json")).exists()  # not his to remove any more
    commit(new, 3)
    new.retain(5)
    assert not Path(old.path_of(late)).exists()
    assert steps_of(new) == [3, 1]
    new.close()
    after = LocalDirectory(tmp_path / "c", OtherMachine())
    after.claim()
    assert steps_of(after) == [3, 1]
    after.close()
    old.close()


def test_a_save_under_way_is_cleared_by_the_successor_and_fails_by_name(tmp_path: Path) -> None:
    old = LocalDirectory(tmp_path / "c")
    commit(old, 1)
    begun = old.begin(2)
    new = LocalDirectory(tmp_path / "c", OtherMachine())
    new.claim()
    assert not Path(old.path_of(begun)).exists()
    with pytest.raises(FencedError):
        old.publish(begun, b"manifest")
    old.close()
    new.close()


def test_numbers_go_on_and_old_claims_are_pruned(tmp_path: Path) -> None:
    for attempt in range(1, 21):
        directory = LocalDirectory(tmp_path / "c")
        assert directory.claim() == attempt
        if attempt in (1, 15):
            commit(directory, attempt)
        directory.close()
    left = os.listdir(tmp_path / "c" / ATTEMPTS)
    assert len(left) <= 18 and "000000020.accepted" in left
    assert steps_of(LocalDirectory(tmp_path / "c")) == [15, 1]


def test_an_emptied_directory_is_owned_anew(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    commit(directory, 1)
    for path in sorted((tmp_path / "c").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    commit(directory, 2)
    assert steps_of(directory) == [2]
    with pytest.raises(DirectoryInUseError):
        LocalDirectory(tmp_path / "c").claim()
    directory.close()


def test_a_forked_child_owns_nothing(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    commit(directory, 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            directory.close()
            directory.begin(2)
        except CheckpointError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(DirectoryInUseError):
        LocalDirectory(tmp_path / "c").claim()
    commit(directory, 2)
    directory.close()
