"""A directory of checkpoints on a file system: what is in it, who may use it, what readers see."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoint.local_commits import SHARD, commit, snapshot, steps_of

from tradewind._core import native
from tradewind.checkpoint.claims import decode_list, encode_list
from tradewind.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NewerVersionError,
    NotACheckpointDirectoryError,
    VanishedCheckpointError,
)
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import ATTEMPTS, MARKER, CommitName

FOLDER = "step-000000000007.000000002.00000000aabbccdd"


# --- what is in it ------------------------------------------------------------------------------


def test_a_commit_and_what_is_around_it(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "yet"
    directory = LocalDirectory(path)
    assert directory.committed() == [] and not path.exists()
    name = commit(directory, 7, b"shard")
    found = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    assert found == sorted(
        [
            ".lock",
            "attempts/000000001",
            "attempts/000000001.accepted",
            "latest",
            f"{name.folder}/manifest.json",
            f"{name.folder}/{SHARD}",
            MARKER,
        ]
    )
    assert (path / "latest").read_text() == name.folder + "\n"
    assert json.loads((path / MARKER).read_text()) == {
        "format": "tradewind-checkpoints",
        "version": 1,
    }
    claim = json.loads((path / "attempts" / "000000001").read_text())
    assert claim["pid"] == os.getpid() and {"host", "boot_id", "started"} <= set(claim)
    assert directory.committed() == [name]
    assert directory.read_manifest(name) == b"manifest of 7"
    directory.close()


def test_five_syncs_until_a_save_is_durable(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    directory = LocalDirectory(tmp_path / "c", env)
    commit(directory, 1)
    env.clear()
    name = commit(directory, 2)
    folder = directory.path_of(name)
    kinds = [
        (each["kind"], each["path"].removeprefix(directory.where)) for each in env.operations()
    ]
    inside = f"/{name.folder}"
    assert [each for each in kinds if each[0].startswith(("sync", "rename"))] == [
        ("sync", f"{inside}/{SHARD}"),
        ("sync_directory", inside),
        ("sync", f"{inside}/manifest.json.tmp"),
        ("rename", f"{inside}/manifest.json.tmp"),
        ("sync_directory", inside),
        ("sync_directory", ""),
        ("rename", "/latest.tmp"),
    ]
    assert folder == os.path.join(directory.where, name.folder)
    directory.close()


def test_the_second_owner_syncs_what_the_first_may_not_have(tmp_path: Path) -> None:
    first = LocalDirectory(tmp_path / "c")
    old = commit(first, 1)
    first.close()
    second = LocalDirectory(tmp_path / "c")
    new = [commit(second, step) for step in (2, 3)]
    second.close()
    env = native.RecordingEnv()
    third = LocalDirectory(tmp_path / "c", env)
    third.claim()
    synced = Counter(e["path"] for e in env.operations() if e["kind"] == "sync_directory")
    assert synced[third.where] == 1
    assert all(synced[third.path_of(name)] == 1 for name in new)
    assert synced[third.path_of(old)] == 0  # the second owner did
    third.close()


def test_a_clock_that_goes_back_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for number, days in enumerate((0, -400, 3)):
        for clock in ("time", "time_ns"):
            monkeypatch.setattr(time, clock, lambda: now + days * 86_400)  # noqa: B023
        directory = LocalDirectory(tmp_path / "c")
        commit(directory, 10 * number)
        name = commit(directory, 10 * number + 1)
        os.utime(directory.path_of(name), (number, 10_000 - number))
        directory.close()
    assert steps_of(LocalDirectory(tmp_path / "c")) == [21, 20, 11, 10, 1, 0]


# --- who may use it -----------------------------------------------------------------------------


def _file_in_the_way(path: Path) -> None:
    path.write_text("a file")


def _full_of_others(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_text("precious")


def _other_format(path: Path) -> None:
    path.mkdir()
    (path / MARKER).write_text('{"format": "something else", "version": 1}')


def _no_json(path: Path) -> None:
    path.mkdir()
    (path / MARKER).write_bytes(b"\0" * 40)


def _huge_marker(path: Path) -> None:
    path.mkdir()
    (path / MARKER).write_bytes(b" " * 10_000)


def _marker_is_a_folder(path: Path) -> None:
    (path / MARKER).mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_file_in_the_way, "expected a directory, got a file"),
        (_full_of_others, "has no tradewind-checkpoints.json, but 'model.safetensors'"),
        (_other_format, "something else"),
        (_no_json, "cannot be read"),
        (_huge_marker, "is none of ours"),
        (_marker_is_a_folder, "is none of ours"),
    ],
)
def test_what_is_not_ours_is_refused_and_not_touched(make: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "taken"
    make(path)
    before = snapshot(tmp_path)
    directory = LocalDirectory(path)
    for refused in (directory.check, directory.claim, lambda: directory.begin(1)):
        with pytest.raises(NotACheckpointDirectoryError, match=says) as caught:
            refused()
        assert str(path) in str(caught.value)
    directory.close()
    assert snapshot(tmp_path) == before


def test_a_path_below_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises((NotACheckpointDirectoryError, OSError), match="file"):
        LocalDirectory(tmp_path / "file" / "c").claim()
    assert (tmp_path / "file").read_text() == "a file"


def test_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text('{"format": "tradewind-checkpoints", "version": 2}')
    before = snapshot(tmp_path)
    directory = LocalDirectory(tmp_path)
    for refused in (directory.check, directory.claim):
        with pytest.raises(NewerVersionError, match="version 2"):
            refused()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("version", ['"1"', "true", "0", "1.0", "null"])
def test_a_version_that_is_none_is_refused(version: str, tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text(f'{{"format": "tradewind-checkpoints", "version": {version}}}')
    with pytest.raises(NotACheckpointDirectoryError, match="version"):
        LocalDirectory(tmp_path).check()


def test_an_empty_directory_and_a_fresh_disk_are_good(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    directory = LocalDirectory(tmp_path)
    directory.check()
    assert list(tmp_path.iterdir()) == [tmp_path / "lost+found"]
    commit(directory, 1)
    directory.close()
    assert (tmp_path / "lost+found").is_dir()


def test_a_copy_of_commits_alone_is_read_and_gone_on_with(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    name = commit(directory, 4)
    directory.close()
    shutil.copytree(tmp_path / "c" / name.folder, tmp_path / "copy" / name.folder)
    copy = LocalDirectory(tmp_path / "copy")
    copy.check()
    assert copy.committed() == [name]
    commit(copy, 5)
    assert steps_of(copy) == [5, 4]
    copy.close()


def test_strangers_are_left_alone(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    commit(directory, 1)
    strangers = ["notes.txt", "step-1", "step-000000000001", "attempts/read.me", "spare/mine"]
    (tmp_path / "c" / "spare").mkdir()
    for stranger in strangers:
        (tmp_path / "c" / stranger).write_text("mine")
    for step in (2, 3, 4):
        commit(directory, step)
        directory.retain(1)
    directory.close()
    again = LocalDirectory(tmp_path / "c")
    commit(again, 5)
    again.retain(1)
    again.close()
    for stranger in strangers:
        assert (tmp_path / "c" / stranger).read_text() == "mine"


# --- saves that came to nothing -----------------------------------------------------------------


def test_an_abandoned_save_leaves_nothing(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    commit(directory, 1)
    name = directory.begin(2)
    directory.env.write_file(directory.path_of(name, SHARD), b"half")
    directory.abandon(name)
    directory.abandon(name)
    assert not Path(directory.path_of(name)).exists()
    assert steps_of(directory) == [1]
    directory.close()


def test_what_a_killed_owner_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    kept = commit(directory, 1)
    name = directory.begin(2)
    for file in (SHARD, "manifest.json.tmp"):
        directory.env.write_file(directory.path_of(name, file), b"half")
    (tmp_path / "c" / f"{MARKER}.00112233.tmp").write_text("half")
    (tmp_path / "c" / ATTEMPTS / "000000001.accepted.tmp").write_text("half")
    directory.close()
    again = LocalDirectory(tmp_path / "c")
    again.claim()
    assert sorted(os.listdir(tmp_path / "c")) == sorted(
        [".lock", "attempts", "latest", kept.folder, MARKER]
    )
    assert len(os.listdir(tmp_path / "c" / ATTEMPTS)) == 4
    again.close()


def test_what_could_not_be_abandoned_is_removed_later(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    directory = LocalDirectory(tmp_path / "c", env)
    commit(directory, 1)
    name = directory.begin(2)
    env.write_file(directory.path_of(name, SHARD), b"half")
    env.inject(0, error=errno.EIO, sticky=True)
    directory.abandon(name)
    env.heal()
    assert Path(directory.path_of(name)).exists()
    directory.retain(3)
    assert not Path(directory.path_of(name)).exists()
    directory.close()


def test_nothing_is_published_that_was_not_begun(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no save of step-.* was begun"):
        LocalDirectory(tmp_path / "c").publish(CommitName.new(1, 1), b"manifest")


# --- what readers see ---------------------------------------------------------------------------


def test_a_vanished_commit_is_named(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    name = commit(directory, 1)
    shutil.rmtree(directory.path_of(name))
    with pytest.raises(VanishedCheckpointError, match=name.folder):
        directory.read_manifest(name)
    with (
        pytest.raises(VanishedCheckpointError, match=name.folder),
        directory.reading(name, [SHARD]),
    ):
        pass
    directory.close()


def test_a_missing_shard_is_damage(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    name = commit(directory, 1)
    os.remove(directory.path_of(name, SHARD))
    with pytest.raises(DamagedCheckpointError, match=SHARD), directory.reading(name, [SHARD]):
        pass
    assert not Path(directory.path_of(name, SHARD)).exists()  # looking makes nothing
    directory.close()


def test_without_claims_every_commit_counts(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    for step in (1, 2):
        commit(directory, step)
    directory.close()
    shutil.rmtree(tmp_path / "c" / ATTEMPTS)
    assert steps_of(LocalDirectory(tmp_path / "c")) == [2, 1]


def test_a_damaged_list_leaves_the_decision_to_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        directory = LocalDirectory(tmp_path / "c")
        commit(directory, step)
        directory.close()
    newest = tmp_path / "c" / ATTEMPTS / "000000003.accepted"
    whole = newest.read_bytes()
    assert decode_list(whole, "list") == {name.folder for name in directory.committed()[1:]}
    generator = random.Random(5)
    for position in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        newest.write_bytes(damaged)
        assert steps_of(LocalDirectory(tmp_path / "c")) == [3, 2, 1]
    for cut in range(0, len(whole) - 1, 7):
        newest.write_bytes(whole[:cut])
        assert steps_of(LocalDirectory(tmp_path / "c")) == [3, 2, 1]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"accepted": {}}', b'{"accepted": [1]}', b'{"accepted": []}', b"\xff"],
)
def test_a_list_that_is_none_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        decode_list(data, "list")


def test_a_list_is_read_back() -> None:
    names = [CommitName.new(3, step) for step in (4, 2)]
    assert decode_list(encode_list(names), "list") == {name.folder for name in names}
    assert decode_list(encode_list([]), "list") == frozenset()


def test_a_reader_during_saves_and_retention(tmp_path: Path) -> None:
    """Whatever it lists was committed; what it then reads is whole, or named as vanished."""
    owner = LocalDirectory(tmp_path / "c", recycled_from_bytes=4)
    commit(owner, 0, b"0" * 64)
    has_ended = threading.Event()
    failures: list[BaseException] = []
    num_read = [0, 0]

    def read(number: int) -> None:
        reader = LocalDirectory(tmp_path / "c")
        try:
            newest = 0
            while not has_ended.is_set() or num_read[number] < 20:
                names = reader.committed()
                assert names and names[0].step >= newest
                newest = names[0].step
                for name in names:
                    try:
                        manifest = reader.read_manifest(name)
                        with reader.reading(name, [SHARD]):
                            data = Path(reader.path_of(name, SHARD)).read_bytes()
                    except VanishedCheckpointError:
                        continue
                    assert manifest == b"manifest of %d" % name.step
                    assert data == b"%d" % (name.step % 10) * 64
                    num_read[number] += 1
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in readers:
        thread.start()
    for step in range(1, 120):
        name = owner.begin(step)
        owner.take_spare(name, SHARD, 64)
        with open(owner.path_of(name, SHARD), "r+b" if _exists(owner, name) else "wb") as file:
            file.write(b"%d" % (step % 10) * 64)
        owner.publish(name, b"manifest of %d" % step)
        owner.retain(1 + step % 3)
    has_ended.set()
    for thread in readers:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures, failures[0]
    assert min(num_read) >= 20
    owner.close()


def _exists(directory: LocalDirectory, name: CommitName) -> bool:
    return directory.env.status(directory.path_of(name, SHARD)) is not None


def test_a_link_to_a_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "disk")
    directory = LocalDirectory(tmp_path / "c")
    commit(directory, 1)
    assert steps_of(LocalDirectory(tmp_path / "disk")) == [1]
    directory.close()


def test_folders_of_names_that_are_not_quite_ours_are_no_commits(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    commit(directory, 1)
    for folder in (FOLDER.upper(), FOLDER + "0", FOLDER[:-1], f"x{FOLDER}", f"{FOLDER}.tmp"):
        (tmp_path / "c" / folder).mkdir()
        (tmp_path / "c" / folder / "manifest.json").write_text("{}")
    (tmp_path / "c" / FOLDER.replace("0007", "0008")).mkdir()  # no manifest
    (tmp_path / "c" / FOLDER.replace("0007", "0009")).write_text("a file")
    assert steps_of(directory) == [1]
    directory.close()
