"""Every request of a save on S3 fails in every way, once and for good: what was acknowledged is not
lost, nothing is committed twice, and what cannot be done says why."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoint.stores.commits import Made, make_commit
from checkpoint.stores.faulty_server import FaultyServer, Seen, nth
from checkpoint.stores.places import MIN_PART_BYTES

from tradewind.checkpoint import CheckpointError
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.patience import Deadline, Patience, StoreError
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory

SOON = timedelta(seconds=120)
TRANSIENT = ("503", "409", "dropped", "lost")


def whole(remote: RemoteDirectory, made: Made) -> bool:
    there = {
        file: remote.store.read(f"{made.name.folder}/{file}", 1 << 30)
        for file in [*made.data(), "manifest.json"]
    }
    return there == {**made.data(), "manifest.json": made.manifest}


class Saves:
    """Saves of ascending steps in one place, each one part and two parts large."""

    def __init__(self, remote: RemoteDirectory, place: Path) -> None:
        self.remote, self.place = remote, place
        self.acknowledged: Made | None = None
        self.step = 0
        self.remote.claim()

    def next(self) -> Made:
        self.step += 1
        assert self.remote.attempt is not None
        name = CommitName.new(self.remote.attempt, self.step)
        return make_commit(self.place, name, (8192, 2 * MIN_PART_BYTES))

    def commit(self, made: Made) -> None:
        """All that an upload does: data, manifest, retention."""
        with made.sources() as sources:
            self.remote.upload(made.name, sources, Deadline(SOON))
        self.remote.publish(made.name, made.manifest)
        self.acknowledged = made
        self.remote.retain(1)

    def check(self, tried: Made) -> None:
        """A reader finds what was acknowledged last, or what was tried since, and all of it."""
        assert self.acknowledged is not None
        reader = RemoteDirectory(self.remote.store)
        newest = reader.committed()[0]
        assert newest in (self.acknowledged.name, tried.name)
        if newest == tried.name:
            self.acknowledged = tried  # whole, though perhaps nobody was told
        assert whole(reader, self.acknowledged)


def requests_of_a_save(saves: Saves, server: FaultyServer) -> list[str]:
    for _ in range(2):  # the first clears what an owner before it left
        server.reset()
        made = saves.next()
        saves.commit(made)
        saves.check(made)
    server.reset()
    made = saves.next()
    saves.commit(made)
    whats = server.whats()
    saves.check(made)
    return whats


@pytest.mark.parametrize("fault", TRANSIENT)
def test_each_request_fails_once(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path, fault: str
) -> None:
    saves = Saves(RemoteDirectory(opened(s3_url)), tmp_path)
    whats = requests_of_a_save(saves, s3)
    assert Counter(what.split()[0] for what in whats) >= Counter("put part complete list".split())
    for number in range(len(whats)):
        made = saves.next()
        s3.reset(nth(number, fault))
        saves.commit(made)  # one fault is always survived
        hit = s3.seen[number].what
        s3.reset()
        saves.check(made)
        assert saves.remote.committed() == [made.name], hit
    print(f"{fault}: each of {len(whats)} requests of a save failed once; all saves committed")


@pytest.mark.parametrize("fault", ["503", "lost", "403"])
def test_from_each_request_on_all_fail(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path, fault: str
) -> None:
    impatient = Patience(num_tries=2, first_pause=timedelta(milliseconds=1))
    saves = Saves(RemoteDirectory(opened(s3_url, patience=impatient)), tmp_path)
    whats = requests_of_a_save(saves, s3)
    ends: Counter[str] = Counter()
    for number in range(len(whats)):
        made = saves.next()
        has_failed = False
        s3.reset(lambda seen, number=number: fault if seen.number >= number else None)
        try:
            saves.commit(made)
        except (StoreError, CheckpointError) as raised:
            has_failed = True
            assert saves.remote.where in str(raised)
        s3.reset()
        saves.check(made)
        ends["failed" if has_failed else "committed"] += 1
        # The next save makes up for it, and clears away what this one left.
        after = saves.next()
        saves.commit(after)
        saves.check(after)
        assert saves.remote.committed() == [after.name]
        folders = {e.key.split("/")[0] for e in saves.remote.store.entries("step-")}
        assert folders == {after.name.folder}
    assert ends["failed"] >= len(whats) - 1  # of `latest` alone nobody hears
    print(f"{fault}: from each of {len(whats)} requests on all failed: {dict(ends)}")


def test_each_request_of_a_claim_fails_once(
    s3: FaultyServer, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    store = opened(s3_url)
    RemoteDirectory(store).claim()
    s3.reset()
    RemoteDirectory(store).claim()
    num_requests = len(s3.seen)
    attempt = 2
    for fault in ("503", "lost", "412"):
        for number in range(num_requests):

            def decide(seen: Seen, number: int = number, fault: str = fault) -> str | None:
                fits = seen.is_conditional or fault != "412"
                return fault if fits and seen.number == number else None

            remote = RemoteDirectory(store)
            s3.reset(decide)
            attempt += 1
            assert remote.claim() == attempt, (fault, number, s3.whats())
    s3.reset()
    assert RemoteDirectory(store).claim() == attempt + 1
    print(f"each of {num_requests} requests of a claim failed once in each way")
