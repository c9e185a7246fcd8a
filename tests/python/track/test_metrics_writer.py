"""When rows are written, how calls merge into rows, and what a disk that refuses costs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tradewind.track import Image, Run, open_metrics, run_status
from tradewind.track import writer as writer_module
from tradewind.track.writer import MetricsWriter, flush_interval_s


class Clock:
    """Seconds that pass when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def segments(folder: Path) -> list[list[dict[str, Any]]]:
    """The rows of each segment, read without the package."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "metrics").glob("*.jsonl"))
    ]


def steps(folder: Path) -> list[list[int]]:
    return [[row["step"] for row in rows] for rows in segments(folder)]


@pytest.mark.parametrize(
    ("elapsed_s", "last_flush_s", "expected_s"),
    [
        (0, 0, 2),
        (150, 0.001, 2),
        (1_000, 0.001, 10),
        (86_400, 0.001, 60),
        (10, 0.3, 30),  # a slow disk: flushes take 1% of the time all the same
        (10, 50, 60),
    ],
)
def test_interval(elapsed_s: float, last_flush_s: float, expected_s: float) -> None:
    assert flush_interval_s(elapsed_s, last_flush_s) == pytest.approx(expected_s)


def test_a_day_makes_some_1500_segments() -> None:
    now, count = 1.0, 0
    while now < 86_400:
        now += flush_interval_s(now, 0.01)
        count += 1
    assert 1_200 < count < 2_000


def test_flushes_come_at_intervals(tmp_path: Path) -> None:
    clock = Clock()
    writer = MetricsWriter(tmp_path, 1, clock)
    writer.add(1, {"loss": 1.0})
    writer.add(2, {"loss": 1.0})
    assert steps(tmp_path) == []
    clock.now += 1.0
    writer.add(3, {"loss": 1.0})
    assert steps(tmp_path) == [[1, 2]]  # the newest step may still grow
    clock.now += 1.9
    writer.add(4, {"loss": 1.0})
    assert steps(tmp_path) == [[1, 2]]
    clock.now += 0.2
    writer.add(4, {"accuracy": 0.5})
    assert steps(tmp_path) == [[1, 2], [3]]
    writer.close()
    assert segments(tmp_path)[2][0]["loss"] == 1.0
    assert segments(tmp_path)[2][0]["accuracy"] == 0.5


def test_many_rows_do_not_wait(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 1, Clock())
    for step in range(writer_module.MAX_WAITING_ROWS):
        writer.add(step, {"loss": 1.0})
    assert [len(each) for each in steps(tmp_path)] == [writer_module.MAX_WAITING_ROWS - 1]


def test_large_pictures_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_WAITING_MEDIA_BYTES", 5_000)
    writer = MetricsWriter(tmp_path, 1, Clock())
    for step in range(4):
        writer.add(step, {"picture": Image(np.zeros((40, 50), np.uint8))})
    assert steps(tmp_path) == [[0, 1]]


def test_calls_for_one_step_are_one_row(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 4, Clock())
    writer.add(1, {"a": 1, "b": 1})
    writer.add(2, {"a": 5})
    writer.add(1, {"b": 2, "c": 3})
    writer.close()
    first, second = segments(tmp_path)[0]
    assert {name: first[name] for name in ("step", "attempt", "a", "b", "c")} == {
        "step": 1, "attempt": 4, "a": 1, "b": 2, "c": 3,
    }  # fmt: skip
    assert second["step"] == 2
    assert first["time"] <= second["time"]


def test_a_step_logged_after_it_was_written_is_merged_by_readers(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        run.log(1, {"a": 1.0, "b": 1.0})
        run.flush()
        run.log(1, {"b": 2.0, "c": 3.0})
    assert steps(tmp_path) == [[1], [1]]
    (row,) = open_metrics(tmp_path).rows()
    assert (row["a"], row["b"], row["c"]) == (1.0, 2.0, 3.0)


def test_the_callers_dict_stays_the_callers(tmp_path: Path) -> None:
    values: dict[str, float] = {"loss": 1.0}
    writer = MetricsWriter(tmp_path, 1, Clock())
    writer.add(1, values)
    values["loss"] = 2.0
    writer.add(1, {"other": 1.0})
    writer.close()
    assert segments(tmp_path)[0][0]["loss"] == 1.0
    assert values == {"loss": 2.0}


def test_threads_lose_no_row(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:

        def work(first: int) -> None:
            for step in range(first, 4_000, 4):
                run.log(step, {"loss": float(step)})
                if step % 400 < 4:
                    run.flush()

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    found = open_metrics(tmp_path).series("loss")
    assert found.steps.tolist() == list(range(4_000))
    assert found.values.tolist() == [float(step) for step in range(4_000)]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A switch: while it holds True, writes take a few bytes and then find the disk full."""
    write, switch = os.write, [False]

    def refuse(descriptor: int, data: Any) -> int:
        if not switch[0]:
            return write(descriptor, data)
        if len(data) > 8:
            return write(descriptor, data[:8])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    yield switch
    switch[0] = False


def test_a_full_disk_costs_a_warning_and_no_rows(tmp_path: Path, full_disk: list[bool]) -> None:
    clock = Clock()
    writer = MetricsWriter(tmp_path, 1, clock)
    writer.add(1, {"loss": 1.0})
    full_disk[0] = True
    clock.now += 2
    with pytest.warns(UserWarning, match=r"cannot be written now.*No space left.*000001\.jsonl"):
        writer.add(2, {"loss": 2.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        clock.now += 10
        writer.add(3, {"loss": 3.0})
    assert segments(tmp_path) == []
    assert list((tmp_path / "metrics").iterdir()) == []
    full_disk[0] = False
    writer.add(4, {"loss": 4.0})
    assert segments(tmp_path) == []  # tried again at the next interval only
    clock.now += 10
    writer.add(5, {"loss": 5.0})
    assert steps(tmp_path) == [[1, 2, 3, 4]]
    writer.close()
    full_disk[0] = True
    clock.now += 100
    writer.add(6, {"loss": 6.0})
    clock.now += 100
    with pytest.warns(UserWarning, match="cannot be written now"):  # a new trouble warns anew
        writer.add(7, {"loss": 7.0})


def test_a_full_disk_is_not_tried_at_every_row(
    tmp_path: Path, full_disk: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_WAITING_ROWS", 10)
    writer = MetricsWriter(tmp_path, 1, Clock())
    full_disk[0] = True
    tries = []
    monkeypatch.setattr(writer._segments, "write", lambda rows: tries.append(1) or _no_space())
    with pytest.warns(UserWarning):
        for step in range(60):
            writer.add(step, {"loss": 1.0})
    assert 1 < len(tries) <= 6


def _no_space() -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_close_on_a_full_disk_raises_and_can_be_repeated(
    tmp_path: Path, full_disk: list[bool]
) -> None:
    run = Run.open(tmp_path, config={})
    run.log(1, {"loss": 1.0})
    full_disk[0] = True
    with pytest.raises(OSError, match=r"could not be closed.*1 row\(s\) wait.*close\(\) again"):
        run.close()
    assert not run.is_closed
    with pytest.raises(OSError, match=r"000001\.jsonl"):
        run.flush()
    assert run_status(tmp_path) == "running"
    full_disk[0] = False
    run.close()
    assert run_status(tmp_path) == "finished"
    assert open_metrics(tmp_path).series("loss").values.tolist() == [1.0]


def test_a_full_disk_does_not_hide_the_exception(tmp_path: Path, full_disk: list[bool]) -> None:
    with (
        pytest.warns(UserWarning, match="could not be closed"),
        pytest.raises(ZeroDivisionError),
        Run.open(tmp_path, config={}) as run,
    ):
        run.log(1, {"loss": 1.0})
        full_disk[0] = True
        _ = 1 / 0
    full_disk[0] = False
    run.close("failed")


def test_a_directory_that_vanished_loses_no_rows(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", config={})
    run.log(1, {"loss": 1.0})
    (tmp_path / "run" / "metrics").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="metrics"):
        run.flush()
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "metrics")
    run.close()
    assert steps(tmp_path / "run") == [[1]]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k,nr_inodes=100", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip(f"mount is not permitted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_really_full_disk(tiny_disk: Path) -> None:
    run = Run.open(tiny_disk / "run", config={})
    ballast = tiny_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    for step in range(300):
        run.log(step, {"loss": float(step), "note": "x" * 20})
    with pytest.raises(OSError, match="No space left on device"):
        run.flush()
    ballast.unlink()
    run.close()
    assert open_metrics(tiny_disk / "run").series("loss").steps.tolist() == list(range(300))
    assert run_status(tiny_disk / "run") == "finished"
