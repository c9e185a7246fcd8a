"""Commits brought back from a store: every block is checked, and what is wrong is named."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoint.stores.commits import Made, make_commit
from checkpoint.stores.faulty_server import FaultyServer, every
from checkpoint.stores.places import MIN_PART_BYTES

from tradewind.checkpoint import DamagedCheckpointError
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.download import fetch_files, read_checked_manifest
from tradewind.checkpoint.stores.patience import Deadline, StoreError
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory

SIZES = (4096, 3 * MIN_PART_BYTES + 4096)
LARGE = "shard-00001-of-00002.safetensors"


def saved(remote: RemoteDirectory, place: Path) -> Made:
    made = make_commit(place, CommitName.new(remote.claim(), 1), SIZES)
    with made.sources() as sources:
        remote.upload(made.name, sources, Deadline(timedelta(seconds=120)))
    remote.publish(made.name, made.manifest)
    return made


def fetch(remote: RemoteDirectory, made: Made, folder: Path, **options: Any) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    manifest, data = read_checked_manifest(remote, made.name)
    assert data == made.manifest
    options = {"part_bytes": MIN_PART_BYTES, **options}
    assert fetch_files(remote, made.name, manifest, folder, **options) == sum(SIZES)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_comes_back_is_what_went(opened: Any, any_url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(opened(any_url))
    made = saved(remote, tmp_path)
    assert fetch(remote, made, tmp_path / "back") == made.data()
    # Over files of an earlier try, longer and shorter ones.
    (tmp_path / "back" / LARGE).write_bytes(bytes(10))
    (tmp_path / "back" / made.files[0].name).write_bytes(bytes(100_000))
    assert fetch(remote, made, tmp_path / "back", num_threads=1) == made.data()


@pytest.mark.parametrize("fault", ["503", "dropped", "truncated", "corrupted"])
def test_one_fault_on_the_way_is_survived(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path, fault: str
) -> None:
    remote = RemoteDirectory(opened(s3_url))
    made = saved(remote, tmp_path)
    s3.reset(every(f"get {LARGE}", fault, times=1))
    assert fetch(remote, made, tmp_path / "back") == made.data()
    assert s3.whats().count(f"get {LARGE}") == 5


def test_a_way_that_always_corrupts(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    remote = RemoteDirectory(opened(s3_url))
    made = saved(remote, tmp_path)
    s3.reset(every(f"get {LARGE}", "corrupted"))
    with pytest.raises(DamagedCheckpointError, match=f"{LARGE}: block .*: expected CRC32C"):
        fetch(remote, made, tmp_path / "back")
    s3.reset(every(f"get {LARGE}", "truncated"))
    with pytest.raises(StoreError, match=f"{LARGE}: get_object"):
        fetch(remote, made, tmp_path / "back")


def test_a_flipped_bit_is_named(opened: Any, any_url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(opened(any_url))
    made = saved(remote, tmp_path)
    key = f"{made.name.folder}/{LARGE}"
    data = bytearray(made.data()[LARGE])
    data[5 * 65536 + 7] ^= 4
    remote.store.replace(key, bytes(data))
    with pytest.raises(DamagedCheckpointError, match=rf"{LARGE}: block 5 \(from byte 327680\)"):
        fetch(remote, made, tmp_path / "back")


@pytest.mark.parametrize("num_bytes", [-4096, 4096])
def test_another_size_is_named(opened: Any, any_url: str, tmp_path: Path, num_bytes: int) -> None:
    remote = RemoteDirectory(opened(any_url))
    made = saved(remote, tmp_path)
    data = (made.data()[LARGE] + bytes(4096))[: SIZES[1] + num_bytes]
    remote.store.replace(f"{made.name.folder}/{LARGE}", data)
    text = f"expected {SIZES[1]} bytes by its manifest, the store has {len(data)}"
    with pytest.raises(DamagedCheckpointError, match=text):
        fetch(remote, made, tmp_path / "back")


def test_a_missing_shard_is_named(opened: Any, any_url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(opened(any_url))
    made = saved(remote, tmp_path)
    remote.store.delete([f"{made.name.folder}/{LARGE}"])
    with pytest.raises(DamagedCheckpointError, match=f"{LARGE}: missing"):
        fetch(remote, made, tmp_path / "back")


def test_the_manifest_of_another_commit(opened: Any, any_url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(opened(any_url))
    made, other = saved(remote, tmp_path), saved(remote, tmp_path)
    key = f"{made.name.folder}/manifest.json"
    remote.store.replace(key, other.manifest)
    with pytest.raises(DamagedCheckpointError, match="its manifest is that of step 1"):
        fetch(remote, made, tmp_path / "back")
    remote.store.replace(key, made.manifest[:-1])
    with pytest.raises(DamagedCheckpointError, match="expected a seal"):
        fetch(remote, made, tmp_path / "back")


def test_a_stuck_download_ends_at_its_deadline(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    remote = RemoteDirectory(opened(s3_url))
    made = saved(remote, tmp_path)
    s3.reset(every(f"get {LARGE}", "hang"))
    with pytest.raises(StoreError, match=r"within 2 s; is the (connection|store)"):
        fetch(remote, made, tmp_path / "back", deadline=timedelta(seconds=2))
