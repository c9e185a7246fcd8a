"""Restores beside a process that saves and retires, and a stop in the middle of a save."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint.crash.checkpointer_saver import CheckpointerSaver
from checkpoint.crash.crash_states import fast_folder
from checkpoint.crash.savers import MakeSaver, PlainSaver, payload

from tradewind._core import native
from tradewind.checkpoint import local_directory

NUM_SAVES = 60


@pytest.mark.parametrize("make", [PlainSaver, CheckpointerSaver])
def test_a_restore_during_saves_and_retention(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the step that was the newest when it began, or a newer one; no old milestone."""
    monkeypatch.setattr(local_directory, "RECYCLED_FROM_BYTES", 1)
    acknowledged = 0
    has_ended = threading.Event()
    failures: list[BaseException] = []
    num_restored = 0

    def read(path: Path) -> None:
        nonlocal num_restored
        reader = make(path, native.posix_env())
        try:
            while not has_ended.is_set() or num_restored < 5:
                least = acknowledged
                restored = reader.restore()
                assert restored is not None and restored[0] >= least, (restored, least)
                assert restored[1] == payload(restored[0])
                num_restored += 1
        except BaseException as error:
            failures.append(error)
        finally:
            reader.close()

    with fast_folder(tmp_path) as folder:
        owner = make(folder / "checkpoints", native.posix_env(), keep=1, keep_every=10)
        owner.save(0)
        thread = threading.Thread(target=read, args=(folder / "checkpoints",))
        thread.start()
        for step in range(1, NUM_SAVES):
            owner.save(step)
            acknowledged = step
        has_ended.set()
        thread.join(120)
        assert not thread.is_alive()
        assert not failures, failures[0]
        assert owner.steps() == sorted({*range(0, NUM_SAVES, 10), NUM_SAVES - 1}, reverse=True)
        owner.close()


@pytest.mark.parametrize("make", [PlainSaver, CheckpointerSaver])
def test_only_newer_ones_are_there_when_a_restore_comes_to_read(
    make: MakeSaver, tmp_path: Path
) -> None:
    """The owner retires what a reader has just listed, for newer ones, each time it reads."""
    owner = PlainSaver(tmp_path / "c", native.posix_env(), keep=1, keep_every=100)
    if make is CheckpointerSaver:
        owner = CheckpointerSaver(tmp_path / "c", native.posix_env(), keep=1, keep_every=100)
    owner.save(0)
    owner.save(1)
    reader = make(tmp_path / "c", native.posix_env())
    directory = _directory_of(reader)
    listed, saves = directory.committed, iter((2, 3, 4))

    def committed() -> Any:
        names = listed()
        step = next(saves, None)
        if step is not None:
            owner.save(step)
        return names

    directory.committed = committed  # type: ignore[method-assign]
    assert reader.restore() == (4, payload(4))
    reader.close()
    owner.close()


def _directory_of(saver: Any) -> local_directory.LocalDirectory:
    directory = getattr(saver, "directory", None) or saver._checkpointer._directory
    assert isinstance(directory, local_directory.LocalDirectory)
    return directory
