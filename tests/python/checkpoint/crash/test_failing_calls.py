"""Every call of a save that changes the disk fails in every way, once or from then on."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from checkpoint.crash.checkpointer_saver import CheckpointerSaver
from checkpoint.crash.crash_states import fast_folder
from checkpoint.crash.savers import MakeSaver, PlainSaver, payload

from tradewind._core import native
from tradewind.checkpoint import local_directory
from tradewind.checkpoint.errors import CheckpointError

SHORT = "short write"
FAULTS: list[tuple[str, dict[str, int]]] = [
    ("EIO", {"error": errno.EIO}),
    ("ENOSPC", {"error": errno.ENOSPC}),
    ("EDQUOT", {"error": errno.EDQUOT}),
    ("EINTR", {"error": errno.EINTR}),
    (SHORT, {"short_bytes": 100}),
    ("short, then ENOSPC", {"short_bytes": 600, "error": errno.ENOSPC}),
]
SAVED_BEFORE = (1, 2, 3)


def _num_calls(make: MakeSaver, path: Path, is_new_process: bool) -> int:
    """How many calls the save under test makes when nothing fails."""
    env = native.RecordingEnv()
    saver = _prepared(make, path, env, is_new_process)
    env.clear()
    saver.save(4)
    saver.close()
    shutil.rmtree(path)
    return len(env.operations())


def _prepared(make: MakeSaver, path: Path, env: native.RecordingEnv, is_new_process: bool):
    saver = make(path, env)
    for step in SAVED_BEFORE:
        saver.save(step)
    if is_new_process:
        saver.close()
        saver = make(path, env)
    return saver


def _check(saver, path: Path, make: MakeSaver, is_acknowledged: bool, what: str) -> None:
    reader = make(path, native.posix_env())
    restored = reader.restore()
    reader.close()
    allowed = (4,) if is_acknowledged else (3, 4)
    assert restored is not None and restored[0] in allowed, what
    assert restored[1] == payload(restored[0]), what


@pytest.mark.parametrize("is_new_process", [False, True], ids=["goes on", "new process"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("make", [PlainSaver, CheckpointerSaver])
def test_a_failing_call(
    make: MakeSaver,
    sticky: bool,
    is_new_process: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_directory, "RECYCLED_FROM_BYTES", 1)
    num_tried = num_failed = 0
    with fast_folder(tmp_path) as folder:
        path = folder / "checkpoints"
        num_calls = _num_calls(make, path, is_new_process)
        assert num_calls > 15
        for name, fault in FAULTS:
            for index in range(num_calls):
                what = f"call {index}: {name}"
                env = native.RecordingEnv()
                saver = _prepared(make, path, env, is_new_process)
                env.inject(index, sticky=sticky, **fault)
                num_tried += 1
                try:
                    saver.save(4)
                    is_acknowledged = True
                except (CheckpointError, OSError):
                    is_acknowledged = False
                    num_failed += 1
                # Direct I/O never gets on where every write ends within a sector.
                harmless = ("EINTR",) if sticky else ("EINTR", SHORT)
                assert is_acknowledged or name not in harmless, what
                _check(saver, path, make, is_acknowledged, what)
                env.heal()
                saver.save(5)
                assert saver.restore() == (5, payload(5)), what
                saver.close()
                shutil.rmtree(path)
    assert num_failed > num_tried // 4
    with capsys.disabled():
        print(f"\n  failing calls, {make.__name__}: {num_tried} tried, {num_failed} saves failed")


def test_a_full_disk_gives_its_spares_back(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    saver = PlainSaver(tmp_path / "checkpoints", env)
    for step in (1, 2, 3):
        saver.save(step)
    assert list((tmp_path / "checkpoints" / "spare").iterdir())
    env.inject(3, error=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        saver.save(4)
    assert not list((tmp_path / "checkpoints" / "spare").iterdir())
    saver.save(5)
    assert saver.restore() == (5, payload(5))
