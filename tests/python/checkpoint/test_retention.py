"""Which commits stay, in what order the others go, and which of their files are used again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint.local_commits import SHARD, commit, steps_of
from hypothesis import given
from hypothesis import strategies as st

from tradewind._core import native
from tradewind.checkpoint.directory import to_keep
from tradewind.checkpoint.errors import VanishedCheckpointError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import CommitName

names = st.builds(
    CommitName,
    attempt=st.integers(1, 3),
    step=st.integers(0, 12),
    id=st.integers(0, 2**64 - 1).map(lambda value: f"{value:016x}"),
)


@given(
    st.lists(names, unique=True, max_size=12),
    st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.data(),
)
def test_what_stays_is_what_the_rule_says(
    committed: list[CommitName], keep: int, keep_every: int | None, data: st.DataObject
) -> None:
    verified = data.draw(st.none() | st.sampled_from(committed)) if committed else None
    kept = to_keep(committed, keep, keep_every, verified)
    for name in committed:
        num_newer = sum((o.attempt, o.id) > (name.attempt, name.id) for o in committed)
        is_milestone = (
            keep_every is not None
            and name.step % keep_every == 0
            and not any(o > name and o.step == name.step for o in committed)
        )
        assert (name in kept) == (num_newer < keep or is_milestone or name == verified)
    assert kept <= set(committed)


@pytest.mark.parametrize(("keep", "keep_every"), [(0, None), (-1, None), (3, 0), (3, -5)])
def test_counts_below_one_are_refused(keep: int, keep_every: int | None) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        to_keep([], keep, keep_every)


def test_what_was_verified_is_not_kept_where_it_is_gone() -> None:
    gone, there = CommitName.new(1, 1), CommitName.new(1, 2)
    assert to_keep([there], 1, None, gone) == {there}


def test_a_name_made_later_is_newer_whatever_its_step() -> None:
    made = [CommitName.new(4, step) for step in (30, 40, 20, 20)]
    assert sorted(made) == made
    assert CommitName.new(5, 0) > made[-1]


def test_the_oldest_go_and_milestones_and_the_verified_stay(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    made = [commit(directory, step) for step in (1, 5, 7, 10, 11, 12, 13)]
    retired = directory.retain(2, 5, made[2])
    assert [name.step for name in retired] == [1, 11]
    assert steps_of(directory) == [13, 12, 10, 7, 5]
    assert directory.retain(2, 5, made[2]) == []
    folders = {path.name for path in (tmp_path / "c").glob("step-*")}
    assert folders == {name.folder for name in directory.committed()}
    directory.close()


def test_retention_counts_only_what_is_really_there(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    made = [commit(directory, step) for step in (1, 2, 3, 4)]
    os.remove(directory.path_of(made[2], "manifest.json"))  # somebody's hand
    assert [name.step for name in directory.retain(2)] == [1]
    assert steps_of(directory) == [4, 2]
    directory.close()


def test_who_owns_nothing_retires_nothing(tmp_path: Path) -> None:
    owner = LocalDirectory(tmp_path / "c")
    for step in (1, 2, 3):
        commit(owner, step)
    assert LocalDirectory(tmp_path / "c").retain(1) == []
    assert steps_of(owner) == [3, 2, 1]
    owner.close()


# --- files that are used again ------------------------------------------------------------------


def _recycling(path: Path) -> LocalDirectory:
    return LocalDirectory(path, recycled_from_bytes=4)


def _file_id(path: str) -> object:
    status = native.posix_env().status(path)
    return None if status is None else status.file_id


def test_a_freed_file_is_taken_by_the_next_save(tmp_path: Path) -> None:
    directory = _recycling(tmp_path / "c")
    first, _ = commit(directory, 1), commit(directory, 2)
    freed = _file_id(directory.path_of(first, SHARD))
    directory.retain(1)
    assert len(list((tmp_path / "c" / "spare").iterdir())) == 1
    name = directory.begin(3)
    assert directory.take_spare(name, SHARD, 16)
    assert _file_id(directory.path_of(name, SHARD)) == freed
    assert not directory.take_spare(name, SHARD, 16)
    directory.close()


def test_the_file_of_the_nearest_size_is_taken(tmp_path: Path) -> None:
    directory = _recycling(tmp_path / "c")
    shards = {"shard-00000-of-00003.safetensors": 10, "shard-00001-of-00003.safetensors": 500}
    shards["shard-00002-of-00003.safetensors"] = 90
    name = directory.begin(1)
    for file_name, size in shards.items():
        directory.env.write_file(directory.path_of(name, file_name), bytes(size))
    directory.publish(name, b"manifest")
    commit(directory, 2)
    directory.retain(1)
    new = directory.begin(3)
    assert directory.take_spare(new, SHARD, 100)
    assert os.stat(directory.path_of(new, SHARD)).st_size == 90
    assert directory.take_spare(new, "shard-00001-of-00003.safetensors", 1000)
    assert os.stat(directory.path_of(new, "shard-00001-of-00003.safetensors")).st_size == 500
    directory.close()


def test_small_files_are_not_worth_a_sync(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    commit(directory, 1)
    commit(directory, 2)
    directory.retain(1)
    assert not (tmp_path / "c" / "spare").exists()
    assert not directory.take_spare(directory.begin(3), SHARD, 16)
    directory.close()


def test_at_most_one_saves_worth_of_spares_is_kept(tmp_path: Path) -> None:
    directory = _recycling(tmp_path / "c")
    for step in range(6):
        commit(directory, step)
    directory.retain(2)
    assert len(list((tmp_path / "c" / "spare").iterdir())) == 1
    assert steps_of(directory) == [5, 4]
    directory.close()
    assert list((tmp_path / "c" / "spare").iterdir()) == []


def test_a_file_with_a_hard_link_is_not_overwritten(tmp_path: Path) -> None:
    directory = _recycling(tmp_path / "c")
    first, _ = commit(directory, 1, b"precious"), commit(directory, 2)
    os.link(directory.path_of(first, SHARD), tmp_path / "copy")
    directory.retain(1)
    assert not directory.take_spare(directory.begin(3), SHARD, 8)
    assert (tmp_path / "copy").read_bytes() == b"precious"
    directory.close()


def test_a_spare_that_was_linked_since_is_not_overwritten(tmp_path: Path) -> None:
    directory = _recycling(tmp_path / "c")
    commit(directory, 1)
    commit(directory, 2)
    directory.retain(1)
    (spare,) = (tmp_path / "c" / "spare").iterdir()
    os.link(spare, tmp_path / "copy")
    assert not directory.take_spare(directory.begin(3), SHARD, 16)
    directory.close()


def test_a_file_that_somebody_reads_is_not_overwritten(tmp_path: Path) -> None:
    owner, reader = _recycling(tmp_path / "c"), LocalDirectory(tmp_path / "c")
    first, _ = commit(owner, 1, b"being read"), commit(owner, 2)
    with reader.reading(first, [SHARD]), open(owner.path_of(first, SHARD), "rb") as file:
        owner.retain(1)
        assert not owner.take_spare(owner.begin(3), SHARD, 10)
        assert file.read() == b"being read"
    with pytest.raises(VanishedCheckpointError), reader.reading(first, [SHARD]):
        pass
    owner.close()


def test_an_uploads_lock_keeps_a_file_until_it_is_given_back(tmp_path: Path) -> None:
    owner = _recycling(tmp_path / "c")
    first, _ = commit(owner, 1), commit(owner, 2)
    lock = native.posix_env().lock_file(owner.path_of(first, SHARD), exclusive=False)
    assert lock is not None
    with lock:
        owner.retain(1)
    assert not (tmp_path / "c" / "spare").exists()
    commit(owner, 3)
    owner.retain(1)
    assert len(list((tmp_path / "c" / "spare").iterdir())) == 1
    owner.close()


def test_what_is_none_of_ours_in_a_folder_stays(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "c")
    first, _ = commit(directory, 1), commit(directory, 2)
    note = Path(directory.path_of(first, "notes.txt"))
    note.write_text("the good one")
    assert directory.retain(1) == [first]
    assert [path.name for path in note.parent.iterdir()] == ["notes.txt"]
    assert steps_of(directory) == [2] and directory.retain(1) == []
    directory.close()


def test_the_manifest_goes_first(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    directory = LocalDirectory(tmp_path / "c", env, recycled_from_bytes=4)
    first, _ = commit(directory, 1), commit(directory, 2)
    env.clear()
    directory.retain(1)
    done = [(each["kind"], each["path"]) for each in env.operations()]
    folder = directory.path_of(first)
    assert done[0] == ("remove", f"{folder}/manifest.json")
    assert done[1] == ("sync_directory", folder)
    assert ("rename", f"{folder}/{SHARD}") in done[2:]
    directory.close()
