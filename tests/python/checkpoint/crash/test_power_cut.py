"""A power cut after every operation of saves, retention and restarts loses nothing acknowledged."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint.crash.checkpointer_saver import CheckpointerSaver
from checkpoint.crash.crash_states import Record, check_power_cuts, fast_folder
from checkpoint.crash.savers import SHARD, MakeSaver, PlainSaver

from tradewind._core import native
from tradewind.checkpoint import local_directory
from tradewind.checkpoint.errors import CheckpointError

Run = Callable[[Record, MakeSaver], None]


def _first_saves(record: Record, make: MakeSaver) -> None:
    """Of an empty place, until files are recycled."""
    saver = make(record.path, record.env)
    for step in (1, 2, 3, 4, 5):
        record.save(saver, step)


def _restarts(record: Record, make: MakeSaver) -> None:
    """Attempts that follow each other; one dies with a save begun."""
    for steps in ((1, 2), (3,), (4, 5)):
        saver = make(record.path, record.env)
        for step in steps:
            record.save(saver, step)
        if isinstance(saver, PlainSaver):
            _begin_and_die(saver.directory)
        saver.close()


def _begin_and_die(directory: local_directory.LocalDirectory) -> None:
    name = directory.begin(99)
    directory.take_spare(name, SHARD, 9000)
    directory.env.write_file(directory.path_of(name, SHARD), b"never published")


def _goes_back(record: Record, make: MakeSaver) -> None:
    """Training that went back to an earlier step and saves again from there."""
    saver = make(record.path, record.env)
    for step in (10, 20, 30, 15, 16):
        record.save(saver, step)


def _calls_fail(record: Record, make: MakeSaver) -> None:
    """One call of each save fails: a sync, perhaps, after which nothing is sure of its bytes."""
    saver = make(record.path, record.env)
    for step in range(1, 9):
        if step > 2:
            record.env.inject(3 * (step - 2), error=errno.EIO)
        with contextlib.suppress(CheckpointError, OSError):
            record.save(saver, step)
        record.env.heal()


@pytest.mark.parametrize("run", [_first_saves, _restarts, _goes_back, _calls_fail])
@pytest.mark.parametrize("make", [PlainSaver, CheckpointerSaver])
def test_restores_what_was_acknowledged(
    run: Run,
    make: MakeSaver,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_directory, "RECYCLED_FROM_BYTES", 1)
    with fast_folder(tmp_path) as folder:
        record = Record(native.RecordingEnv(), folder / "run")
        record.root.mkdir()
        run(record, make)
        tally = check_power_cuts(record, make, folder)
    assert tally.points > 50 and tally.states > 100
    with capsys.disabled():
        print(f"\n  power cuts, {make.__name__}, {run.__name__.strip('_')}: {tally}")
