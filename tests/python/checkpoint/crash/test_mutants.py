"""The crash tests find every protocol that is wrong: each is planted here, and must be reported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from checkpoint.crash.bit_rot import check_bit_rot
from checkpoint.crash.crash_states import Record, Violation, check_power_cuts, fast_folder
from checkpoint.crash.savers import SHARD, MakeSaver, PlainSaver, payload, seal

from tradewind._core import native
from tradewind.checkpoint.folders import CommitFolders
from tradewind.checkpoint.names import MANIFEST, CommitName

Prepare = Callable[[pytest.MonkeyPatch, native.RecordingEnv], None]


class ManifestFirst(PlainSaver):
    """Publishes, then writes what the manifest names."""

    def save(self, step: int) -> None:
        directory, data = self.directory, payload(step)
        name = directory.begin(step)
        directory.publish(name, seal(step, data))
        directory.env.write_file(directory.path_of(name, SHARD), data)
        directory.env.sync_directory(directory.path_of(name))


class RetentionFirst(PlainSaver):
    """Makes room before the new commit is there."""

    def save(self, step: int) -> None:
        for name in self.directory.committed():
            self.directory._folders.remove(name)
        super().save(step)


class ChecksumNotChecked(PlainSaver):
    """Believes what it reads."""

    def read(self, name: CommitName) -> bytes:
        path = self.directory.path_of(name, SHARD)
        return bytes(self.directory.env.read_file(path, 1 << 20))


class SkippingEnv:
    """An Env without the syncs of what `skips` says, each a path below the directory."""

    def __init__(self, env: Any, skips: Callable[[str], bool]) -> None:
        self._env = env
        self._skips = skips
        self.is_on = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def sync_directory(self, path: str) -> None:
        if not (self.is_on and self._skips(path)):
            self._env.sync_directory(path)

    def write_file(
        self, path: str, data: bytes, exclusive: bool = False, sync: bool = True
    ) -> None:
        self._env.write_file(path, data, exclusive, sync and not (self.is_on and self._skips(path)))


def _record(folder: Path) -> Record:
    record = Record(native.RecordingEnv(), folder / "run")
    record.root.mkdir()
    return record


def _save_five(make: MakeSaver, folder: Path) -> Record:
    record = _record(folder)
    saver = make(record.path, record.env)
    for step in (1, 2, 3, 4, 5):
        record.save(saver, step)
    return record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with ExitStack() as stack:
        yield stack.enter_context(fast_folder(tmp_path))


@pytest.mark.parametrize("make", [ManifestFirst, RetentionFirst])
def test_a_wrong_order_is_found(make: MakeSaver, folder: Path) -> None:
    record = _save_five(make, folder)
    with pytest.raises(Violation):
        check_power_cuts(record, PlainSaver, folder)


@pytest.mark.parametrize(("files", "directories"), [(True, False), (False, True)])
def test_missing_syncs_are_found(files: bool, directories: bool, folder: Path) -> None:
    record = _record(folder)
    saver = PlainSaver(record.path, record.env)
    record.save(saver, 1)
    record.env.drop_syncs(files, directories)
    record.save(saver, 2)
    record.save(saver, 3)
    with pytest.raises(Violation):
        check_power_cuts(record, PlainSaver, folder)


@pytest.mark.parametrize("when", ["from the first on", "from the second save on"])
@pytest.mark.parametrize("skipped", ["checkpoints", "step-*", "spare", f"{MANIFEST}.tmp", SHARD])
def test_each_missing_sync_is_found(skipped: str, when: str, folder: Path) -> None:
    record = _record(folder)
    env = SkippingEnv(record.env, lambda path: Path(path).match(skipped))
    saver = PlainSaver(record.path, env)
    for step in (1, 2, 3, 4, 5):
        env.is_on = step > 1 or when == "from the first on"
        record.save(saver, step)
    with pytest.raises(Violation):
        check_power_cuts(record, PlainSaver, folder)


def test_a_claim_that_is_not_durable_is_found(folder: Path) -> None:
    record = _record(folder)
    env = SkippingEnv(record.env, lambda path: Path(path).match("attempts"))
    env.is_on = True
    saver = PlainSaver(record.path, env)
    record.save(saver, 1)
    with pytest.raises(Violation, match="the next save was acknowledged, and step 1 restored"):
        check_power_cuts(record, PlainSaver, folder)


def test_a_recycled_file_of_a_commit_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retire(folders: CommitFolders, name: CommitName) -> None:
        folders._spares.put(folders.path_of(name, SHARD))
        folders._remove_file(name, MANIFEST)
        folders._remove_rest(name, [])

    # With one kept, what is recycled is what an unsynced commit would fall back to.
    monkeypatch.setattr(CommitFolders, "retire", retire)
    record = _save_five(lambda path, env: PlainSaver(path, env, keep=1), folder)
    with pytest.raises(Violation):
        check_power_cuts(record, PlainSaver, folder)


def test_recycling_before_the_manifest_is_surely_gone_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retire(folders: CommitFolders, name: CommitName) -> None:
        folders._remove_file(name, MANIFEST)
        folders._spares.put(folders.path_of(name, SHARD))
        folders._remove_rest(name, [])

    monkeypatch.setattr(CommitFolders, "retire", retire)
    record = _save_five(PlainSaver, folder)
    with pytest.raises(Violation):
        check_power_cuts(record, PlainSaver, folder)


def test_the_protocol_itself_is_not_reported(folder: Path) -> None:
    record = _save_five(PlainSaver, folder)
    assert check_bit_rot(record, PlainSaver) > 90
    check_power_cuts(record, PlainSaver, folder)


def test_an_unchecked_checksum_is_found(folder: Path) -> None:
    record = _save_five(PlainSaver, folder)
    with pytest.raises(Violation):
        check_bit_rot(record, ChecksumNotChecked)
