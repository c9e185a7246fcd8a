"""The upload process: what it brings to the store, what it holds, how it and the trainer end."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoint.stores.commits import Made, make_commit
from checkpoint.stores.faulty_server import FaultyServer, every
from checkpoint.stores.places import MIN_PART_BYTES, QUICK

from tradewind.checkpoint import FencedError
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.patience import Patience, StoreError
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory
from tradewind.checkpoint.stores.upload_handle import Upload
from tradewind.checkpoint.stores.uploader import Uploader

LONG_S = 120.0  # that nothing here takes, on the busiest machine


class Place:
    """A claimed place in a store, and an uploader to it."""

    def __init__(self, remote: RemoteDirectory, local: Path, **options: Any) -> None:
        self.remote, self.local = remote, local
        self.events: list[tuple[str, str]] = []
        self.told = threading.Event()
        self.attempt = remote.claim()
        options = {"keep": 3, "patience": QUICK, "part_bytes": MIN_PART_BYTES, **options}
        options.setdefault("first_pause", timedelta(milliseconds=1))
        self.uploader = Uploader(remote.where, on_event=self.tell, **options)
        self.uploader.own(self.attempt, remote.accepted)

    def kill(self) -> int | None:
        """Kill the upload process, where there is one at present."""
        pid: int | None = self.uploader.process_id
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    def tell(self, kind: str, text: str) -> None:
        self.events.append((kind, text))
        self.told.set()

    def make(self, step: int, sizes: tuple[int, ...] = (4096, 3 * MIN_PART_BYTES)) -> Made:
        return make_commit(self.local, CommitName.new(self.attempt, step), sizes)

    def submit(self, made: Made, **options: Any) -> Upload:
        return self.uploader.submit(made.name, made.folder, made.files, made.manifest, **options)

    def upload(self, made: Made) -> Upload:
        """Submit, and wait for retention, too."""
        upload = self.submit(made)
        upload.wait(LONG_S)
        assert self.uploader.wait(LONG_S)
        return upload

    def is_stored(self, made: Made) -> bool:
        read = self.remote.store.read
        there = {file: read(f"{made.name.folder}/{file}", 1 << 30) for file in made.data()}
        return there == made.data() and self.remote.read_manifest(made.name) == made.manifest


@pytest.fixture
def make_place(opened: Any, tmp_path: Path) -> Iterator[Any]:
    places: list[Place] = []

    def make(url: str, **options: Any) -> Place:
        places.append(Place(RemoteDirectory(opened(url)), tmp_path, **options))
        return places[-1]

    yield make
    for place in places:
        place.uploader.close()


def is_free(path: Path) -> bool:
    """Whether retention could recycle the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_commits_arrive(make_place: Any, s3_url: str) -> None:
    place = make_place(s3_url, keep=2)
    commits = [place.make(step) for step in (1, 2, 3)]
    for made in commits:
        upload = place.upload(made)
        assert upload.error is None
        assert upload.bytes == sum(file.size_bytes for file in made.files)
        assert upload.duration_s > 0
    assert place.remote.committed() == [commits[2].name, commits[1].name]
    assert place.is_stored(commits[2])
    assert place.events == []
    assert all(is_free(made.folder / file.name) for made in commits for file in made.files)


def test_the_manifest_comes_last_between_two_looks_at_the_claims(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    s3.reset()
    made = place.make(2)
    place.upload(made)
    whats = s3.whats()
    manifest = whats.index("put manifest.json")
    small, large = (file.name for file in made.files)
    assert whats.count(f"part {large}") == 3
    assert max(whats.index(f"put {small}"), whats.index(f"complete {large}")) < manifest
    looks = [number for number, what in enumerate(whats) if what.startswith("list ")]
    assert looks[1] == manifest - 1
    assert looks[2] == manifest + 1
    assert whats.index("put latest") > looks[2]


def test_many_shards(make_place: Any, s3_url: str) -> None:
    """More descriptors than one message holds."""
    place = make_place(s3_url)
    made = place.make(1, sizes=(4096,) * 230)
    place.submit(made).wait(LONG_S)
    assert place.is_stored(made)


def test_to_files_by_fsspec(make_place: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    place = make_place(f"file://{tmp_path}/there/a")
    made = place.make(1)
    place.submit(made).wait(LONG_S)
    assert place.is_stored(made)
    assert (tmp_path / "there/a" / made.name.folder / "manifest.json").exists()


def test_the_process_has_no_torch(make_place: Any, s3_url: str) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    maps = Path(f"/proc/{place.uploader.process_id}/maps").read_text()
    assert "libtorch" not in maps
    assert "_native" not in maps


def test_files_that_retention_unlinks_still_arrive_and_are_locked(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    s3.reset(every("begin", "hang"))
    made = place.make(2)
    upload = place.submit(made)
    data = made.data()
    assert not any(is_free(made.folder / name) for name in data)
    for name in data:
        (made.folder / name).unlink()
    s3.reset()  # what hung is dropped, and tried again
    upload.wait(LONG_S)
    read = place.remote.store.read
    assert {name: read(f"{made.name.folder}/{name}", 1 << 30) for name in data} == data


def test_a_forked_child_holds_neither_locks_nor_the_process(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    s3.reset(every("begin", "hang"))
    made = place.make(2)
    place.submit(made)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:  # a loader's worker, that stays
        answer = b"?"
        try:
            held = [Path(f"/proc/self/fd/{fd}") for fd in range(3, 200)]
            links = [os.readlink(path) for path in held if path.is_symlink()]
            answer = b"y" if any(str(made.folder) in link for link in links) else b"n"
        finally:
            os.write(told, answer)
            signal.pause()
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"n"
        s3.reset()
        assert place.uploader.wait(LONG_S)
        assert all(is_free(made.folder / name) for name in made.data())
        pid = place.uploader.process_id
        place.uploader.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


def test_newer_ones_take_the_place_of_those_that_wait(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    s3.reset(every("begin", "hang"))
    commits = [place.make(step) for step in (2, 3, 4, 5)]
    uploads = [place.submit(made, gives_way=made.name.step != 3) for made in commits]
    s3.reset()
    for upload in uploads:
        upload.wait(LONG_S)
    steps = [name.step for name in place.remote.committed()]
    assert 3 in steps
    assert 5 in steps
    assert 4 not in steps
    assert uploads[2].successor is uploads[3]


def test_an_outage_is_an_event_and_made_up_for(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    place = make_place(s3_url)
    s3.reset(every("", "503", times=20))
    made = place.make(1)
    upload = place.submit(made)
    upload.wait(LONG_S)
    assert place.is_stored(made)
    assert {kind for kind, _ in place.events} == {"upload-delayed"}
    assert "upload of step 1" in place.events[0][1]
    assert "SlowDown" in place.events[0][1]


def test_in_an_outage_the_newest_is_what_is_tried(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    place = make_place(s3_url, first_pause=timedelta(seconds=LONG_S))
    s3.reset(lambda seen: "503")
    first = place.submit(place.make(1))
    assert place.told.wait(LONG_S)  # the first has failed once, and rests
    assert not first.is_done
    second_made = place.make(2)
    s3.reset()
    second = place.submit(second_made)
    first.wait(LONG_S)
    assert first.successor is second
    assert place.remote.committed() == [second_made.name]


def test_a_refusal_fails_at_once(make_place: Any, s3_url: str, s3: FaultyServer) -> None:
    place = make_place(s3_url)
    s3.reset(every("put", "403"))
    upload = place.submit(place.make(1))
    with pytest.raises(StoreError, match=r"403 AccessDenied.*allow s3:ListBucket"):
        upload.wait(LONG_S)
    assert [kind for kind, _ in place.events] == ["upload-failed"]
    s3.reset()
    made = place.make(2)
    place.submit(made).wait(LONG_S)
    assert place.is_stored(made)


def test_fenced(make_place: Any, s3_url: str, opened: Any) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    RemoteDirectory(opened(s3_url)).claim()
    with pytest.raises(FencedError, match="attempt 2 owns"):
        place.upload(place.make(2))
    assert [name.step for name in place.remote.committed()] == [1]


@pytest.mark.parametrize("when", ["begin", "part", "complete", "put manifest.json"])
def test_a_killed_process_is_started_again(
    make_place: Any, s3_url: str, s3: FaultyServer, when: str
) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    killed: list[int] = []

    def kill(seen: Any) -> None:
        if seen.what.startswith(when) and not killed:
            killed.append(place.kill())

    s3.reset(before=kill)
    made = place.make(2)
    place.submit(made).wait(LONG_S)
    assert killed
    assert place.uploader.process_id != killed[0]
    assert [name.step for name in place.remote.committed()] == [2, 1]
    assert place.is_stored(made)
    assert [kind for kind, _ in place.events] == ["upload-restarted"]
    assert "with signal 9" in place.events[0][1]


def test_a_process_that_always_dies_is_given_up(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    place = make_place(s3_url)
    s3.reset(before=lambda seen: place.kill())
    with pytest.raises(StoreError, match="ended with signal 9, 4 times; is its memory limited"):
        place.upload(place.make(1))


def test_a_stuck_store_is_named_at_the_deadline(
    make_place: Any, s3_url: str, s3: FaultyServer
) -> None:
    patience = Patience(request=timedelta(seconds=60), silence=timedelta(seconds=60))
    place = make_place(s3_url, patience=patience)
    place.upload(place.make(1))  # the process is up
    place.uploader._deadline = timedelta(seconds=3)
    s3.reset(every("part", "hang"))
    made = place.make(2)
    upload = place.submit(made)
    with pytest.raises(StoreError, match=r"step-.*: .*within .* s; is the (connection|store)"):
        upload.wait(LONG_S)
    assert all(is_free(made.folder / name) for name in made.data())


def test_close_gives_up_what_is_not_done(make_place: Any, s3_url: str, s3: FaultyServer) -> None:
    place = make_place(s3_url)
    place.upload(place.make(1))
    s3.reset(every("begin", "hang"))
    uploads = [place.submit(place.make(2), gives_way=False), place.submit(place.make(3))]
    pid = place.uploader.process_id
    place.uploader.close()
    for upload in uploads:
        with pytest.raises(StoreError, match="the next run on this machine uploads it"):
            upload.wait(LONG_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="is closed"):
        place.submit(place.make(4))
    place.uploader.close()


def test_waiting_has_a_limit(make_place: Any, s3_url: str, s3: FaultyServer) -> None:
    place = make_place(s3_url)
    s3.reset(lambda seen: "hang")
    upload = place.submit(place.make(1))
    with pytest.raises(TimeoutError, match="upload of step 1: not done after"):
        upload.wait(0.01)
    s3.reset()
    upload.wait(LONG_S)


def test_a_file_that_is_gone(make_place: Any, s3_url: str) -> None:
    place = make_place(s3_url)
    made = place.make(1)
    (made.folder / made.files[1].name).unlink()
    with pytest.raises(FileNotFoundError):
        place.submit(made)
    assert is_free(made.folder / made.files[0].name)


TRAINER = """
import signal, sys
from datetime import timedelta
from tradewind.checkpoint.stores.patience import Patience
from tradewind.checkpoint.stores.uploader import Uploader
uploader = Uploader(sys.argv[1], keep=1)
print(uploader.process_id, flush=True)
signal.pause()
"""


def test_the_process_ends_with_its_trainer(s3_url: str) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), s3_url], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    watched = os.pidfd_open(pid)
    try:
        trainer.kill()
        trainer.wait(LONG_S)
        assert select.select([watched], [], [], LONG_S)[0], "the upload process outlived it"
    finally:
        os.close(watched)
        trainer.stdout.close()
