"""`tw.Checkpointer` of a URL: the local directory first, the store behind, the newest of both."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.stores.faulty_server import FaultyServer, every
from checkpoint.stores.places import MIN_PART_BYTES, QUICK

import tradewind as tw
from tradewind.checkpoint import (
    CheckpointError,
    DirectoryInUseError,
    FencedError,
    NotACheckpointDirectoryError,
)
from tradewind.checkpoint.stores import tier as tiers
from tradewind.checkpoint.stores.patience import StoreError
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory

LONG_S = 120.0


class Events(list[tuple[str, str]]):
    """What a Checkpointer tells; `seen` once it has told something."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def __call__(self, kind: str, text: str) -> None:
        self.append((kind, text))
        self.seen.set()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes Checkpointers on machines, each with a local directory of its own. They are closed
    without waiting for uploads."""
    made: list[tw.Checkpointer] = []
    init = tiers.RemoteTier.__init__

    def quick(self: Any, *arguments: Any, **given: Any) -> None:
        given = {"patience": QUICK, "part_bytes": MIN_PART_BYTES, **given}
        init(self, *arguments, **{"first_pause": timedelta(milliseconds=1), **given})

    monkeypatch.setattr(tiers.RemoteTier, "__init__", quick)

    def one(url: str, machine: str = "a", **options: Any) -> tw.Checkpointer:
        options.setdefault("on_event", Events())
        made.append(tw.Checkpointer(url, local=tmp_path / machine, **options))
        return made[-1]

    yield one
    for checkpointer in made:
        checkpointer.close(0.0)


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"weights": torch.randn(300_000, generator=generator), "step": step}


def empty() -> dict[str, Any]:
    return {"weights": torch.zeros(300_000), "step": -1}


def save(checkpointer: tw.Checkpointer, step: int) -> tw.checkpoint.Save:
    saved = checkpointer.save(state_of(step), step=step)
    saved.wait(LONG_S)
    assert checkpointer._tier is not None
    assert checkpointer._tier._uploader is not None
    assert checkpointer._tier._uploader.wait(LONG_S)  # for retention, too
    return saved


def restored(checkpointer: tw.Checkpointer, step: int | None = None) -> int | None:
    """The step restored, to the bit."""
    state = empty()
    found = checkpointer.restore(state, step)
    if found is not None:
        assert state["step"] == found
        assert torch.equal(state["weights"], state_of(found)["weights"])
    return found


def remote_steps(opened: Any, url: str) -> list[int]:
    return [name.step for name in RemoteDirectory(opened(url)).committed()]


def test_a_new_machine_goes_on_from_the_store(make: Any, any_url: str, tmp_path: Path) -> None:
    if any_url.startswith("memory"):
        with pytest.raises(ValueError, match="memory is gone when this process is"):
            make(any_url)
        return
    first = make(any_url)
    assert restored(first) is None
    saved = save(first, 2)
    assert saved.is_durable
    assert first.last_durable is not None
    assert first.last_durable[0] == 2
    assert first.upload_s > 0
    assert first.path == any_url
    first.close()
    second = make(any_url, "b")
    assert second.steps()[-1] == 2
    assert restored(second) == 2
    save(second, 3)
    assert second.steps()[-2:] == [2, 3]
    assert (tmp_path / "b" / "latest").read_text().startswith("step-000000000003.000000002.")
    assert [kind for kind, _ in second._on_event] == []


def test_saves_return_before_they_are_uploaded(
    make: Any, s3_url: str, s3: FaultyServer, opened: Any
) -> None:
    checkpointer = make(s3_url)
    save(checkpointer, 1)
    s3.reset(every("begin", "hang"))
    saves = [checkpointer.save(state_of(step), step=step) for step in (2, 3, 4)]
    for saved in saves:
        assert saved._done.wait(LONG_S)  # on disk
        assert saved.is_done
        assert not saved.is_durable
    assert checkpointer.last_durable[0] == 1
    with pytest.raises(TimeoutError, match="upload of step 4: not done after"):
        checkpointer.wait(0.01)
    s3.reset()
    checkpointer.wait(LONG_S)
    assert all(saved.is_durable for saved in saves)  # by themselves, or by the one that came after
    assert remote_steps(opened, s3_url)[0] == 4
    assert checkpointer.last_durable[0] == 4


def test_an_outage_during_training_is_an_event(
    make: Any, s3_url: str, s3: FaultyServer, opened: Any
) -> None:
    checkpointer = make(s3_url)
    save(checkpointer, 1)
    s3.reset(lambda seen: "503")
    saves = [checkpointer.save(state_of(step), step=step) for step in range(2, 7)]
    assert all(saved._done.wait(LONG_S) for saved in saves)
    events: Events = checkpointer._on_event
    assert events.seen.wait(LONG_S)
    assert set(events.kinds()) == {"upload-delayed"}
    assert "503 SlowDown" in events[0][1]
    assert s3_url in events[0][1]
    s3.reset()
    checkpointer.wait(LONG_S)
    assert remote_steps(opened, s3_url)[0] == 6
    save(checkpointer, 7)
    assert remote_steps(opened, s3_url)[0] == 7


def test_a_store_that_cannot_be_asked_at_the_start(
    make: Any, s3_url: str, s3: FaultyServer, tmp_path: Path
) -> None:
    """Whether there is something to go on from is not known: nothing is begun anew."""
    s3.reset(lambda seen: "503")
    with pytest.raises(StoreError, match="503 SlowDown"):
        make(s3_url)
    s3.reset()
    with pytest.raises(StoreError, match="make the bucket, or correct the URL"):
        make("s3://no-such-bucket/a")
    assert not (tmp_path / "a").exists()
    checkpointer = make(s3_url)
    s3.reset(lambda seen: "503")
    with pytest.raises(StoreError, match="503 SlowDown"):
        checkpointer.restore(empty())
    with pytest.raises(StoreError, match="503 SlowDown"):
        checkpointer.save(state_of(1), step=1)


def test_what_was_not_uploaded_is_uploaded_by_the_next_run(
    make: Any, s3_url: str, s3: FaultyServer, opened: Any
) -> None:
    first = make(s3_url)
    save(first, 1)
    s3.reset(every("begin", "hang"))
    assert first.save(state_of(2), step=2)._done.wait(LONG_S)
    first.close(0.0)  # as a kill between the local commit and the upload would
    s3.reset()
    assert remote_steps(opened, s3_url) == [1]
    second = make(s3_url)
    assert restored(second) == 2
    second.own()
    assert second._tier._uploader.wait(LONG_S)
    assert remote_steps(opened, s3_url) == [2, 1]
    second.close()
    assert restored(make(s3_url, "b")) == 2


TRAINER = """
import os, signal, sys
import torch, tradewind as tw
url, local = sys.argv[1:]
checkpointer = tw.Checkpointer(url, local=local)
def state(step):
    generator = torch.Generator().manual_seed(step)
    return {"weights": torch.randn(300_000, generator=generator), "step": step}
checkpointer.save(state(1), step=1).wait(120)
print("ready", flush=True)
sys.stdin.readline()
assert checkpointer.save(state(2), step=2)._done.wait(120)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_between_local_commit_and_upload(
    make: Any, s3_url: str, s3: FaultyServer, opened: Any, tmp_path: Path
) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), s3_url, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    with trainer:
        assert trainer.stdout.readline() == "ready\n"
        s3.reset(every("begin", "hang"))
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        assert trainer.wait(LONG_S) == -signal.SIGKILL
    s3.reset()
    assert remote_steps(opened, s3_url) == [1]
    # A machine without the directory has step 1, the same machine step 2.
    assert restored(make(s3_url, "b")) == 1
    same = make(s3_url)
    assert restored(same) == 2
    same.own()
    assert same._tier._uploader.wait(LONG_S)
    assert remote_steps(opened, s3_url) == [2, 1]


def test_a_machine_that_comes_back_does_not_go_on_from_what_its_successor_never_saw(
    make: Any, s3_url: str, s3: FaultyServer, opened: Any
) -> None:
    old = make(s3_url)
    save(old, 1)
    s3.reset(every("begin", "hang"))
    assert old.save(state_of(9), step=9)._done.wait(LONG_S)
    old.close(0.0)
    s3.reset()
    successor = make(s3_url, "b")
    assert restored(successor) == 1
    save(successor, 2)
    successor.close()
    back = make(s3_url, on_event=Events())
    assert restored(back) == 2
    assert back.steps() == [1, 2]
    (kind, text), *more = back._on_event
    assert kind == "passed-over"
    assert "step 9 of" in text
    assert "attempt 2 went on without it" in text
    assert more == []
    save(back, 3)
    assert remote_steps(opened, s3_url) == [3, 2, 1]


def test_a_zombie_is_told_and_commits_nothing_in_the_store(
    make: Any, s3_url: str, opened: Any
) -> None:
    zombie = make(s3_url)
    save(zombie, 1)
    successor = make(s3_url, "b")
    assert restored(successor) == 1
    save(successor, 2)
    saved = zombie.save(state_of(5), step=5)
    with pytest.raises(FencedError, match="attempt 2 owns"):
        saved.wait(LONG_S)
    assert not saved.is_durable
    assert zombie._on_event.kinds() == ["upload-failed"]
    assert remote_steps(opened, s3_url) == [2, 1]
    assert restored(make(s3_url, "c")) == 2


def test_two_on_one_machine(make: Any, s3_url: str) -> None:
    """The second is refused before it has fenced the first."""
    first = make(s3_url)
    save(first, 1)
    second = make(s3_url)
    with pytest.raises(DirectoryInUseError):
        second.save(state_of(2), step=2)
    assert restored(second) == 1  # reading is free
    save(first, 3)


def test_retention_in_both_places(make: Any, s3_url: str, opened: Any, tmp_path: Path) -> None:
    checkpointer = make(s3_url, keep=2, keep_every=2)
    for step in range(1, 6):
        save(checkpointer, step)
    assert remote_steps(opened, s3_url) == [5, 4, 2]
    folders = sorted(path.name for path in (tmp_path / "a").glob("step-*"))
    assert [int(name.split(".")[0].removeprefix("step-")) for name in folders] == [2, 4, 5]


def test_a_damaged_copy_is_repaired_from_the_store(make: Any, s3_url: str, tmp_path: Path) -> None:
    first = make(s3_url)
    save(first, 1)
    save(first, 2)
    first.close()
    for shard in (tmp_path / "a").glob("step-000000000002.*/shard-*"):
        with shard.open("r+b") as file:
            file.seek(70_000)
            file.write(b"damage")
    second = make(s3_url)
    assert restored(second) == 2
    (kind, text), *more = second._on_event
    assert kind == "repaired"
    assert "brought from the store anew" in text
    assert "block 0" in text
    assert more == []
    assert second.verify() == 2
    save(second, 3)


def test_a_damaged_object_is_passed_over(
    make: Any, s3_url: str, opened: Any, tmp_path: Path
) -> None:
    first = make(s3_url)
    save(first, 1)
    saved = save(first, 2)
    first.close()
    store = opened(s3_url)
    shard = next(e.key for e in store.entries(f"{saved.name.folder}/") if "shard" in e.key)
    data = store.read(shard, 1 << 30)
    store.replace(shard, data[:70_000] + b"damage" + data[70_006:])
    new = make(s3_url, "b")
    assert restored(new) == 1
    kinds = {kind for kind, _ in new._on_event}
    assert kinds == {"passed-over"}
    assert "block 0" in new._on_event[0][1]
    assert len(list((tmp_path / "b").glob("step-*"))) == 1
    # Nothing is whole: said, not begun anew.
    first_shard = next(e.key for e in store.entries("step-000000000001.") if "shard" in e.key)
    store.delete([first_shard])
    with pytest.raises(CheckpointError):
        make(s3_url, "c").restore(empty(), step=1)


def test_an_older_step_is_brought_when_asked_for(make: Any, s3_url: str) -> None:
    first = make(s3_url)
    for step in (1, 2, 3):
        save(first, step)
    first.close()
    second = make(s3_url, "b")
    save(second, 4)
    assert restored(second, 2) == 2
    assert restored(second) == 4
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        second.restore(empty(), step=7)


def test_no_url(tmp_path: Path) -> None:
    for options in ({"local": tmp_path / "x"}, {"store_options": {}}):
        with pytest.raises(ValueError, match="local, store_options: expected a URL as path"):
            tw.Checkpointer(tmp_path / "a", **options)


def test_a_place_in_the_store_that_is_not_ours(make: Any, s3_url: str, opened: Any) -> None:
    opened(s3_url).replace("thesis.pdf", b"precious")
    with pytest.raises(NotACheckpointDirectoryError, match=r"thesis\.pdf"):
        make(s3_url)


def test_the_local_directory_of_a_url_where_none_is_given(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tw.Checkpointer(s3_url) as checkpointer:
        checkpointer.save(state_of(1), step=1)
    (place,) = (tmp_path / "cache/tradewind/checkpoints").iterdir()
    assert (place / "latest").exists()
    shutil.rmtree(place)
    with tw.Checkpointer(s3_url + "/") as checkpointer:
        assert restored(checkpointer) == 1
    assert place.exists()


def test_nothing_is_left_running(make: Any, s3_url: str) -> None:
    checkpointer = make(s3_url)
    save(checkpointer, 1)
    pid = checkpointer._tier._uploader.process_id
    checkpointer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
