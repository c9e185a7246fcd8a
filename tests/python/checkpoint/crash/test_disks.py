"""Disks as they are met: full at every stage, read-only, without a way in."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_DEADLINE_S = 300
_PROGRAM = '''
import errno, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from checkpoint.crash.savers import PlainSaver, payload
from tradewind._core import native
from tradewind.checkpoint import local_directory
from tradewind.checkpoint.checkpointer import Checkpointer
from tradewind.checkpoint.errors import CheckpointError

disk = Path(sys.argv[2])
MB = 1 << 20
SAVE_BYTES = 9 * MB


def state(step):
    return {"w": torch.full((SAVE_BYTES // 4,), float(step)), "step": step}


def fill(free_bytes):
    """Leave so much room on the disk, to the page."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    stat = os.statvfs(disk)
    take = stat.f_bavail * stat.f_bsize - free_bytes
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(take, 1))


def restored(checkpointer):
    into = state(-1)
    step = checkpointer.restore(into)
    assert step is not None and torch.equal(into["w"], state(step)["w"]), step
    return step


failed = acknowledged = 0
path = disk / "checkpoints"
events = []
checkpointer = Checkpointer(path, keep=2, on_event=lambda *event: events.append(event))
checkpointer.save(state(1), step=1).wait(90)
checkpointer.save(state(2), step=2).wait(90)
last = 2
pages = sorted({*range(0, 24), *(n * MB // 4096 for n in range(1, 22, 2)),
                *(SAVE_BYTES // 4096 + n for n in range(-3, 12))})
for step, free_pages in enumerate(pages, start=3):
    fill(free_pages * 4096)
    save = checkpointer.save(state(step), step=step)
    try:
        save.wait(90)
    except OSError as error:
        assert error.errno in (errno.ENOSPC, errno.EDQUOT), error
        failed += 1
    else:
        acknowledged += 1
        last = step
    assert restored(checkpointer) == last, (step, free_pages)
    with Checkpointer(path) as reader:
        assert restored(reader) == last
(disk / "filler").unlink()
checkpointer.save(state(900), step=900).wait(90)
assert restored(checkpointer) == 900
checkpointer.close()

# A disk that is full from the beginning has no directory yet.
fresh = disk / "fresh"
for free_pages in range(0, 12):
    fill(free_pages * 4096)
    saver = PlainSaver(fresh, native.posix_env())
    try:
        saver.save(1)
    except OSError as error:
        assert error.errno in (errno.ENOSPC, errno.EDQUOT), error
        failed += 1
        saver.close()
        continue
    acknowledged += 1
    assert saver.restore() == (1, payload(1))
    break
print(json.dumps({"failed": failed, "acknowledged": acknowledged}))
'''

_READ_ONLY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from checkpoint.crash.savers import PlainSaver, payload
from tradewind._core import native

saver = PlainSaver(Path(sys.argv[2]) / "checkpoints", native.posix_env())
assert saver.restore() == (2, payload(2))
for where in ("checkpoints", "not/there/yet"):
    try:
        PlainSaver(Path(sys.argv[2]) / where, native.posix_env()).save(3)
    except OSError as error:
        print(json.dumps({"errno": error.errno, "path": str(error.filename)}))
    else:
        raise AssertionError("saved on a read-only disk")
assert saver.restore() == (2, payload(2))
"""


def _in_mount(program: str, mount: str, disk: Path) -> list[dict[str, int]]:
    """What `program` printed, run as root of a namespace of its own, after `mount`."""
    tests = Path(__file__).resolve().parents[2]
    inner = f'{mount} && exec "$0" -c "$1" "$2" "$3"'
    command = ["unshare", "-Urm", "sh", "-c", inner, sys.executable, program, str(tests), str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _refusal() -> str:
    """Why no file system can be mounted here; empty when one can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    command = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if tried.returncode == 0 else f"nothing can be mounted: {tried.stderr.strip()}"


REFUSAL = _refusal()
needs_mount = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)


@needs_mount
def test_a_disk_that_is_full_at_every_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = 'mount -t tmpfs -o size=64m none "$3"'
    told = _in_mount(_PROGRAM, mount, tmp_path)[0]
    assert told["failed"] > 10 and told["acknowledged"] > 5
    with capsys.disabled():
        print(f"\n  a full disk of 64 MB: {told['failed']} saves failed, all by name")


@needs_mount
def test_a_read_only_disk_is_read_and_refused_by_name(tmp_path: Path) -> None:
    _save_two(tmp_path)
    mount = 'mount --bind "$3" "$3" && mount -o remount,bind,ro "$3"'
    refused = _in_mount(_READ_ONLY, mount, tmp_path)
    assert [each["errno"] for each in refused] == [errno.EROFS, errno.EROFS]
    assert all(str(tmp_path) in str(each["path"]) for each in refused)


def test_a_directory_without_permission_is_refused_by_name(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    _save_two(tmp_path)
    program = _READ_ONLY
    for folder in (tmp_path / "checkpoints", tmp_path):
        folder.chmod(0o555)
    try:
        command = [sys.executable, "-c", program, str(Path(__file__).resolve().parents[2])]
        done = subprocess.run(
            [*command, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    finally:
        for folder in (tmp_path, tmp_path / "checkpoints"):
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line)["errno"] for line in done.stdout.splitlines()]
    assert told == [errno.EACCES, errno.EACCES]


def _save_two(folder: Path) -> None:
    from checkpoint.crash.savers import PlainSaver

    from tradewind._core import native

    saver = PlainSaver(folder / "checkpoints", native.posix_env())
    saver.save(1)
    saver.save(2)
    saver.close()
