"""Metrics as readers see them: the merged run, its attempts, and an index that may be lost."""

from __future__ import annotations

import json
import math
import os
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tradewind.track import Run, SegmentError, open_metrics
from tradewind.track.index import FILE_NAME


def write_segment(folder: Path, number: int, rows: list[dict[str, Any]]) -> Path:
    """A segment as the format says, written without the package."""
    path = folder / "metrics" / f"{number:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    defaults = {"time": 100.0 + number, "attempt": 1}
    path.write_text("".join(json.dumps({**defaults, **row}) + "\n" for row in rows))
    return path


def points(folder: Path, name: str, attempt: int | None = None) -> list[tuple[int, float]]:
    with open_metrics(folder) as metrics:
        return [(step, value) for step, _, value in metrics.series(name, attempt)]


def test_series_and_names(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [{"step": 2, "loss": 0.5, "n": 3}, {"step": 5, "loss": 0.25}])
    write_segment(tmp_path, 2, [{"step": 9, "loss": 0.125, "note": {"text": "hello"}}])
    with open_metrics(tmp_path) as metrics:
        assert metrics.names() == ["loss", "n"]
        series = metrics.series("loss")
        assert list(series) == [(2, 101.0, 0.5), (5, 101.0, 0.25), (9, 102.0, 0.125)]
        assert len(series) == 3 and series.steps.dtype.kind == "i"
        assert metrics.attempts() == [1]
        assert list(metrics.rows()) == [
            {"step": 2, "time": 101.0, "attempt": 1, "loss": 0.5, "n": 3},
            {"step": 5, "time": 101.0, "attempt": 1, "loss": 0.25},
            {"step": 9, "time": 102.0, "attempt": 1, "loss": 0.125, "note": {"text": "hello"}},
        ]
        with pytest.raises(KeyError, match="logged are: loss, n"):
            metrics.series("note")
        with pytest.raises(KeyError, match="accuracy"):
            metrics.series("accuracy")


def test_non_finite_numbers_come_back(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        for step, value in enumerate((math.nan, math.inf, -math.inf, 1.0)):
            run.log(step, {"loss": value})
    text = (tmp_path / "metrics" / "000001.jsonl").read_text()
    assert [json.loads(line)["loss"] for line in text.splitlines()] == [
        "NaN",
        "Infinity",
        "-Infinity",
        1.0,
    ]
    values = open_metrics(tmp_path).series("loss").values
    assert math.isnan(values[0]) and values[1:].tolist() == [math.inf, -math.inf, 1.0]
    rows = list(open_metrics(tmp_path).rows())
    assert math.isnan(rows[0]["loss"]) and rows[2]["loss"] == -math.inf


def test_booleans_are_numbers_in_a_series(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [{"step": 1, "vetoed": True}, {"step": 2, "vetoed": False}])
    assert points(tmp_path, "vetoed") == [(1, 1.0), (2, 0.0)]
    assert [row["vetoed"] for row in open_metrics(tmp_path).rows()] == [True, False]


def test_a_resumed_run_continues_and_a_repeated_one_replaces(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [{"step": s, "loss": 1.0, "old": 1.0} for s in range(6)])
    write_segment(tmp_path, 2, [{"step": s, "loss": 2.0, "attempt": 2} for s in range(4, 8)])
    assert points(tmp_path, "loss") == [(s, 1.0 if s < 4 else 2.0) for s in range(8)]
    assert points(tmp_path, "old") == [(s, 1.0) for s in range(4)]
    assert points(tmp_path, "loss", attempt=1) == [(s, 1.0) for s in range(6)]
    assert points(tmp_path, "loss", attempt=2) == [(s, 2.0) for s in range(4, 8)]
    write_segment(tmp_path, 3, [{"step": 0, "loss": 3.0, "attempt": 3}])
    assert points(tmp_path, "loss") == [(0, 3.0)]
    assert open_metrics(tmp_path).first_step(2) == 4


def test_an_attempt_begins_where_it_logged_first(tmp_path: Path) -> None:
    # An epoch's number logged as a step, after a resume at step 50, does not wipe out the curve.
    write_segment(tmp_path, 1, [{"step": s, "loss": 1.0} for s in range(60)])
    rows = [{"step": 50, "loss": 2.0, "attempt": 2}, {"step": 3, "epoch_loss": 9.0, "attempt": 2}]
    write_segment(tmp_path, 2, rows)
    assert len(points(tmp_path, "loss")) == 51
    assert points(tmp_path, "epoch_loss") == [(3, 9.0)]


def test_random_attempts_against_brute_force(tmp_path: Path) -> None:
    rng = random.Random(0)
    logged: dict[tuple[int, int, str], float] = {}
    first: dict[int, int] = {}
    number = 0
    for attempt in range(1, 6):
        step = rng.randrange(0, 30)
        for _ in range(rng.randrange(0, 4)):
            number += 1
            rows = []
            for _ in range(rng.randrange(1, 8)):
                value, name = rng.random(), rng.choice("ab")
                rows.append({"step": step, name: value, "attempt": attempt})
                logged[attempt, step, name] = value
                first.setdefault(attempt, step)
                step += rng.randrange(0, 3)
            write_segment(tmp_path, number, rows)
        open_metrics(tmp_path).close()  # in pieces
    for name in "ab":
        expected = {
            step: value
            for (attempt, step, key), value in sorted(logged.items())
            if key == name
            and all(step < begin for later, begin in first.items() if later > attempt)
        }
        assert dict(points(tmp_path, name)) == expected


def test_the_index_is_incremental(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tradewind.track import index

    read: list[str] = []
    original = index.read_segment
    monkeypatch.setattr(index, "read_segment", lambda p: read.append(p.name) or original(p))
    write_segment(tmp_path, 1, [{"step": 1, "loss": 1.0}])
    with open_metrics(tmp_path) as metrics:
        assert metrics.index_path == tmp_path / FILE_NAME
        write_segment(tmp_path, 2, [{"step": 2, "loss": 2.0}])
        assert len(metrics.series("loss")) == 1
        metrics.refresh()
        assert len(metrics.series("loss")) == 2
    open_metrics(tmp_path).close()
    write_segment(tmp_path, 3, [{"step": 3, "loss": 3.0}])
    assert len(points(tmp_path, "loss")) == 3
    assert read == ["000001.jsonl", "000002.jsonl", "000003.jsonl"]


def test_segments_that_arrive_late_or_changed_rebuild(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [{"step": 1, "loss": 1.0}])
    write_segment(tmp_path, 3, [{"step": 2, "loss": 3.0}])
    assert points(tmp_path, "loss") == [(1, 1.0), (2, 3.0)]
    write_segment(tmp_path, 2, [{"step": 2, "loss": 2.0}, {"step": 3, "loss": 2.0}])
    assert points(tmp_path, "loss") == [(1, 1.0), (2, 3.0), (3, 2.0)]  # the later segment wins
    write_segment(tmp_path, 1, [{"step": 1, "other_name": 1.0}])
    assert points(tmp_path, "loss") == [(2, 3.0), (3, 2.0)]
    for path in (tmp_path / "metrics").iterdir():
        path.unlink()
    (tmp_path / "run.json").write_text('{"schema": 1, "name": "a", "attempts": [{}]}')
    assert open_metrics(tmp_path).names() == []


def damage_header(path: Path) -> None:
    path.write_bytes(b"not a database" * 100)


def damage_body(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200:] = os.urandom(len(data) - 200)
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def other_tables(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_header, damage_body, truncate, empty, other_version, other_tables, missing],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_index_is_rebuilt(tmp_path: Path, damage: Any) -> None:
    rows = [{"step": s, **{f"name{k}": float(s * k) for k in range(9)}} for s in range(400)]
    write_segment(tmp_path, 1, rows)
    expected = points(tmp_path, "name3")
    damage(tmp_path / FILE_NAME)
    assert points(tmp_path, "name3") == expected == [(s, s * 3.0) for s in range(400)]
    with open_metrics(tmp_path) as metrics:
        assert metrics.index_path == tmp_path / FILE_NAME  # and it is a good one now
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_damage_that_shows_only_in_a_query_is_repaired(tmp_path: Path) -> None:
    rows = [{"step": s, **{f"name{k}": float(s * k) for k in range(9)}} for s in range(2_000)]
    write_segment(tmp_path, 1, rows)
    open_metrics(tmp_path).close()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    half = len(data) // 2 // 4096 * 4096
    data[half : half + 40_960] = b"\xff" * 40_960
    path.write_bytes(bytes(data))
    with open_metrics(tmp_path) as metrics:
        for k in range(9):
            found = metrics.series(f"name{k}")
            assert found.values.tolist() == [float(s * k) for s in range(2_000)]


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "fuse.sshfs", "lustre", "9p", "NFS"])
def test_no_index_on_a_network_disk(tmp_path: Path, kind: str) -> None:
    write_segment(tmp_path, 1, [{"step": 1, "loss": 1.0}])
    with open_metrics(tmp_path, filesystem=lambda path: kind) as metrics:
        assert metrics.index_path is None
        assert metrics.series("loss").values.tolist() == [1.0]
    assert not (tmp_path / FILE_NAME).exists()


def test_no_index_in_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_segment(tmp_path, 1, [{"step": 1, "loss": 1.0}])
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert points(tmp_path, "loss") == [(1, 1.0)]
    assert not (tmp_path / FILE_NAME).exists()


def test_a_locked_index_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tradewind.track import index

    monkeypatch.setattr(index, "_BUSY_DEADLINE_S", 0.05)
    write_segment(tmp_path, 1, [{"step": 1, "loss": 1.0}])
    open_metrics(tmp_path).close()
    write_segment(tmp_path, 2, [{"step": 2, "loss": 2.0}])
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with open_metrics(tmp_path) as metrics:
        assert metrics.index_path is None
        assert len(metrics.series("loss")) == 2
    other.rollback()
    other.close()
    with open_metrics(tmp_path) as metrics:
        assert metrics.index_path is not None and len(metrics.series("loss")) == 2


def test_two_readers_fill_one_index(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [{"step": 1, "loss": 1.0}])
    with open_metrics(tmp_path) as first, open_metrics(tmp_path) as second:
        write_segment(tmp_path, 2, [{"step": 2, "loss": 2.0}])
        first.refresh()
        second.refresh()
        assert list(first.series("loss")) == list(second.series("loss"))
        assert len(second.series("loss")) == 2


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 1, "time": 1, "attempt": 1, "loss": 1',
        '{"step": 1, "time": 1, "attempt": 1}',  # no newline
        "{broken}\n",
        "[1]\n",
        '{"step": 1, "time": 1, "loss": 2}\n',
        '{"step": "1", "time": 1, "attempt": 1}\n',
        "\x00\x00\x00\n",
    ],
)
def test_a_torn_segment_is_named(tmp_path: Path, text: str) -> None:
    write_segment(tmp_path, 1, [{"step": 0, "loss": 1.0}])
    good = '{"step": 5, "time": 1, "attempt": 1, "loss": 5}\n'
    (tmp_path / "metrics" / "000002.jsonl").write_text(good + text)
    with pytest.raises(SegmentError, match=r"000002\.jsonl', line 2"):
        open_metrics(tmp_path)
    (tmp_path / "metrics" / "000002.jsonl").unlink()
    assert points(tmp_path, "loss") == [(0, 1.0)]  # nothing of the torn one was taken in


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [{"step": 1, "loss": 1.0}])
    for name in (".000002.jsonl.7.tmp", "notes.txt", "000002.jsonl.bak", "2.jsonl"):
        (tmp_path / "metrics" / name).write_text("?")
    assert points(tmp_path, "loss") == [(1, 1.0)]


def test_segments_are_numbered_on(tmp_path: Path) -> None:
    write_segment(tmp_path, 41, [{"step": 1, "loss": 1.0}])
    with Run.open(tmp_path, config={}) as run:
        run.log(2, {"loss": 2.0})
    assert sorted(path.name for path in (tmp_path / "metrics").iterdir()) == [
        "000041.jsonl",
        "000042.jsonl",
    ]
