"""The commit protocol on object stores: claims, fences, zombies, retention, strangers' places."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoint.stores.commits import Made, make_commit

from tradewind.checkpoint import CheckpointError, FencedError, NewerVersionError
from tradewind.checkpoint import NotACheckpointDirectoryError as NotOurs
from tradewind.checkpoint.errors import VanishedCheckpointError
from tradewind.checkpoint.names import LATEST, MARKER, CommitName
from tradewind.checkpoint.stores.patience import Deadline, StoreError
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory

SOON = timedelta(seconds=120)


def save(remote: RemoteDirectory, place: Path, step: int) -> Made:
    """A commit of two shards, from begin to publish."""
    made = make_commit(place, remote.begin(step), sizes=(4096, 8192))
    with made.sources() as sources:
        remote.upload(made.name, sources, Deadline(SOON))
    remote.publish(made.name, made.manifest)
    return made


def stored(remote: RemoteDirectory, made: Made) -> bool:
    """Whether all of a commit is there, to the byte."""
    there = {
        file: remote.store.read(f"{made.name.folder}/{file}", 1 << 20)
        for file in [*made.data(), "manifest.json"]
    }
    return there == {**made.data(), "manifest.json": made.manifest}


def test_commits_count_once_their_manifest_is_there(
    opened: Any, any_url: str, tmp_path: Path
) -> None:
    remote = RemoteDirectory(opened(any_url))
    remote.check()
    assert remote.committed() == []
    assert remote.claim() == 1
    assert remote.claim() == 1
    first, second = save(remote, tmp_path, 10), save(remote, tmp_path, 20)
    half = make_commit(tmp_path, remote.begin(30))
    with half.sources() as sources:
        remote.upload(half.name, sources, Deadline(SOON))
    reader = RemoteDirectory(opened(any_url))
    reader.check()
    assert reader.committed() == [second.name, first.name]
    assert reader.read_manifest(first.name) == first.manifest
    assert stored(reader, first)
    assert stored(reader, second)
    assert reader.store.read(LATEST, 100) == second.name.folder.encode() + b"\n"
    with pytest.raises(VanishedCheckpointError, match="not there any more"):
        reader.read_manifest(half.name)
    remote.abandon(half.name)
    remote.abandon(first.name)
    assert reader.committed() == [second.name]
    assert {e.key.split("/")[0] for e in reader.store.entries("step-")} == {second.name.folder}


def test_a_zombie_never_commits_again(opened: Any, any_url: str, tmp_path: Path) -> None:
    zombie, successor = RemoteDirectory(opened(any_url)), RemoteDirectory(opened(any_url))
    zombie.claim()
    before = save(zombie, tmp_path, 10)
    late = make_commit(tmp_path, zombie.begin(20))
    with late.sources() as sources:
        zombie.upload(late.name, sources, Deadline(SOON))
    assert successor.claim() == 2
    for act in (
        lambda: zombie.publish(late.name, late.manifest),
        lambda: zombie.begin(30),
        lambda: zombie.retain(1),
    ):
        with pytest.raises(FencedError, match="this process is attempt 1, and attempt 2 owns"):
            act()
    keys = {entry.key for entry in zombie.store.entries(late.name.folder)}
    assert keys == {f"{late.name.folder}/{name}" for name in late.data()}  # no manifest
    zombie.abandon(before.name)  # nor does it take away what the successor accepted
    assert successor.committed() == [before.name]
    after = save(successor, tmp_path, 15)
    assert successor.committed() == [after.name, before.name]


def test_what_a_zombie_published_between_claim_and_look_is_not_acknowledged(
    opened: Any, any_url: str, tmp_path: Path
) -> None:
    """The fence is passed, then the successor claims, then the manifest lands."""
    zombie, successor = RemoteDirectory(opened(any_url)), RemoteDirectory(opened(any_url))
    zombie.claim()
    late = make_commit(tmp_path, zombie.begin(20))
    with late.sources() as sources:
        zombie.upload(late.name, sources, Deadline(SOON))
    create = zombie.store.create

    def claimed_meanwhile(key: str, data: bytes) -> bool:
        successor.claim()
        return create(key, data)

    zombie.store.create = claimed_meanwhile  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        zombie.publish(late.name, late.manifest)
    assert zombie.store.read(f"{late.name.folder}/manifest.json", 1 << 20) is not None
    assert successor.committed() == []
    assert RemoteDirectory(opened(any_url)).committed() == []
    after = save(successor, tmp_path, 1)
    successor.retain(3)  # the zombie's folder goes
    keys = {entry.key.split("/")[0] for entry in successor.store.entries("step-")}
    assert keys == {after.name.folder}


def test_retention(opened: Any, any_url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(opened(any_url))
    remote.claim()
    made = [save(remote, tmp_path, step) for step in (10, 15, 20, 25, 30)]
    dead = make_commit(tmp_path, remote.begin(26))
    with dead.sources() as sources:
        remote.upload(dead.name, sources, Deadline(SOON))
    later = make_commit(tmp_path, CommitName.new(9, 1))  # of an owner that claims just now
    with later.sources() as sources:
        remote.upload(later.name, sources, Deadline(SOON))
    order: list[list[str]] = []
    delete = remote.store.delete
    remote.store.delete = lambda keys: delete(order.append(list(keys)) or order[-1])  # type: ignore
    assert remote.retain(2, keep_every=20) == [made[0].name, made[1].name]
    assert remote.committed() == [made[i].name for i in (4, 3, 2)]
    assert all(stored(remote, made[i]) for i in (4, 3, 2))
    manifests, rest = order
    assert manifests == [f"{made[i].name.folder}/manifest.json" for i in (0, 1)]
    assert len(rest) == 5
    folders = {entry.key.split("/")[0] for entry in remote.store.entries("step-")}
    assert folders == {later.name.folder, *(made[i].name.folder for i in (4, 3, 2))}


def test_attempts_follow_the_local_tier(opened: Any, any_url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(opened(any_url))
    local_only = CommitName.new(6, 40)
    assert remote.claim(at_least=7, also=[local_only]) == 7
    assert remote.acceptance().counts(local_only)
    assert not remote.acceptance().counts(CommitName.new(6, 50))
    assert RemoteDirectory(opened(any_url)).claim(at_least=2) == 8


def test_an_emptied_place(opened: Any, any_url: str, tmp_path: Path) -> None:
    remote = RemoteDirectory(opened(any_url))
    remote.claim()
    made = make_commit(tmp_path, remote.begin(1))
    remote.store.delete([entry.key for entry in remote.store.entries()])
    with pytest.raises(StoreError, match="somebody emptied the place"):
        remote.publish(made.name, made.manifest)


def test_a_place_that_is_not_ours(opened: Any, any_url: str) -> None:
    store = opened(any_url)
    remote = RemoteDirectory(store)
    store.replace("thesis.pdf", b"precious")
    for act in (remote.check, remote.claim):
        with pytest.raises(NotOurs, match=r"no tradewind-checkpoints\.json, but 'thesis\.pdf'"):
            act()
    assert [entry.key for entry in store.entries()] == ["thesis.pdf"]
    store.replace(MARKER, b'{"format": "tradewind-checkpoints", "version": 2}')
    with pytest.raises(NewerVersionError):
        remote.check()
    store.replace(MARKER, b"[]")
    with pytest.raises(NotOurs):
        remote.claim()


def test_a_store_that_ignores_conditions(opened: Any, any_url: str) -> None:
    store = opened(any_url)
    store.create = lambda key, data: store.replace(key, data) or True
    with pytest.raises(CheckpointError, match="overwrites objects although told not to"):
        RemoteDirectory(store).claim()


def test_a_store_without_conditions_says_so(opened: Any, any_url: str) -> None:
    store = opened(any_url)
    store.is_exclusive = False
    with pytest.warns(UserWarning, match="both may take it for theirs"):
        assert RemoteDirectory(store).claim() == 1
