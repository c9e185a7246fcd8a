"""A run from its opening to its end: attempts, statuses, exits, forks, signals."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import track.processes as processes

from tradewind import track
from tradewind.track import Run, RunRecordError, current_run, open_metrics, read_run, run_status


def raw_record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "run.json").read_text())
    return content


def test_a_run_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    with Run.open(path, config={"lr": 0.1}, seed=7) as run:
        assert run.path == path and run.attempt == 1
        assert run_status(path) == "running"
        assert raw_record(path)["attempts"][0]["ended"] is None
    content = raw_record(path)
    assert (content["schema"], content["name"]) == (1, "a")
    (attempt,) = content["attempts"]
    assert attempt["status"] == "finished" and attempt["error"] is None
    assert attempt["config"] == {"lr": 0.1} and attempt["seed"] == 7
    assert attempt["place"] == {"kind": "laptop", "rank": 0, "world_size": 1}
    assert attempt["working_directory"] == os.getcwd()
    assert attempt["machine"]["cores"] >= 1 and attempt["machine"]["memory_bytes"] > 0
    assert attempt["versions"]["python"].count(".") == 2 and attempt["versions"]["torch"]
    assert attempt["started"] < attempt["ended"] and attempt["ended"].endswith("+00:00")
    assert attempt["command"]
    assert run_status(path) == "finished"


def test_reopening_adds_an_attempt_and_overwrites_nothing(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={"lr": 1}) as run:
        run.log(1, {"loss": 3.0})
    first = raw_record(tmp_path)["attempts"][0]
    segment = tmp_path / "metrics" / "000001.jsonl"
    before = segment.read_bytes()
    with Run.open(tmp_path, config={"lr": 2}) as run:
        assert run.attempt == 2
        run.log(2, {"loss": 2.0})
    attempts = raw_record(tmp_path)["attempts"]
    assert attempts[0] == first and attempts[1]["config"] == {"lr": 2}
    assert segment.read_bytes() == before
    assert (tmp_path / "metrics" / "000002.jsonl").exists()
    assert len(list((tmp_path / "events").iterdir())) == 2


@pytest.mark.parametrize(
    ("exception", "status", "error"),
    [
        (ValueError("no such\nlayer"), "failed", "ValueError: no such\nlayer"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (SystemExit(0), "finished", None),
        (SystemExit(), "finished", None),
    ],
)
def test_an_exception_is_the_runs_end(
    tmp_path: Path, exception: BaseException, status: str, error: str | None
) -> None:
    with pytest.raises(type(exception)), Run.open(tmp_path, config={}) as run:
        run.log(1, {"loss": 1.0})
        raise exception
    attempt = raw_record(tmp_path)["attempts"][0]
    assert (attempt["status"], attempt["error"]) == (status, error)
    assert len(open_metrics(tmp_path).series("loss")) == 1


def test_a_run_can_say_how_it_ended(tmp_path: Path) -> None:
    run = Run.open(tmp_path, config={})
    with pytest.raises(ValueError, match="finished, failed, stopped"):
        run.close("crashed")
    assert not run.is_closed
    run.close("stopped", "limit of money")
    assert run.is_closed
    run.close("failed")  # again: nothing
    assert raw_record(tmp_path)["attempts"][0]["error"] == "limit of money"
    assert run_status(tmp_path) == "stopped"
    with pytest.raises(RuntimeError, match="is closed"):
        run.log(1, {"loss": 1.0})


EXITS = """
import sys
from tradewind.track import Run
run = Run.open(sys.argv[1], config={})
run.log(1, {"loss": 1.0})
"""


@pytest.mark.parametrize(
    ("ending", "code", "status", "error"),
    [
        ("", 0, "finished", None),
        ("raise ValueError('bad batch')", 1, "failed", "ValueError: bad batch"),
        ("raise KeyboardInterrupt", None, "stopped", "KeyboardInterrupt"),
        ("run.close('failed', 'mine')", 0, "failed", "mine"),
    ],
)
def test_exit_closes_an_open_run(
    tmp_path: Path, ending: str, code: int | None, status: str, error: str | None
) -> None:
    found, _, err = processes.finish(processes.start(EXITS + ending, tmp_path))
    assert code is None or found == code, err
    attempt = raw_record(tmp_path)["attempts"][0]
    assert (attempt["status"], attempt["error"]) == (status, error)
    assert open_metrics(tmp_path).series("loss").values.tolist() == [1.0]


def test_an_exception_from_before_the_run_is_not_its_end(tmp_path: Path) -> None:
    # As in a notebook, where sys.last_value stays for ever.
    code = "import sys\nsys.last_value = sys.last_exc = ValueError('an old cell')\n" + EXITS
    assert processes.finish(processes.start(code, tmp_path))[0] == 0
    assert run_status(tmp_path) == "finished"


KILLED = """
import sys
from tradewind.track import Run
run = Run.open(sys.argv[1], config={})
for step in range(500):
    run.log(step, {"loss": 1.0 / (step + 1)})
run.flush()
print("flushed")
for step in range(500, 600):
    run.log(step, {"loss": 1.0})
sys.stdin.read()
"""


def test_a_killed_run_is_readable_and_can_be_continued(tmp_path: Path) -> None:
    process = processes.start(KILLED, tmp_path)
    assert processes.next_line(process) == "flushed"
    assert run_status(tmp_path) == "running"
    process.send_signal(signal.SIGKILL)
    processes.finish(process)
    (tmp_path / "metrics" / ".000009.jsonl.1.tmp").write_text('{"step": 1')  # torn by the kill
    assert raw_record(tmp_path)["attempts"][0]["status"] == "running"
    assert run_status(tmp_path) == "ended without closing"
    assert read_run(tmp_path).status == "ended without closing"
    found = open_metrics(tmp_path).series("loss")
    assert found.steps[:500].tolist() == list(range(500))
    assert found.values[:500].tolist() == [1.0 / (step + 1) for step in range(500)]
    with Run.open(tmp_path, config={}) as run:
        run.log(500, {"loss": 9.0})
        assert run.attempt == 2
    statuses = [attempt["status"] for attempt in raw_record(tmp_path)["attempts"]]
    assert statuses == ["ended without closing", "finished"]
    assert list((tmp_path / "metrics").glob(".*")) == []
    assert open_metrics(tmp_path).series("loss").values[500:].tolist() == [9.0]


def test_a_forked_child_cannot_touch_the_run(tmp_path: Path) -> None:
    run = Run.open(tmp_path, config={})
    run.log(1, {"loss": 1.0})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert current_run() is None
            try:
                run.log(2, {"loss": 2.0})
            except RuntimeError as error:
                assert f"process {os.getppid()}" in str(error)
                code = 0
            run.flush()
            run.close("failed", "from the child")
            track.current._close_all()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (tmp_path / "metrics" / "000001.jsonl").exists()
    assert raw_record(tmp_path)["attempts"][0]["status"] == "running"
    # The lock is still held, as another process sees it.
    code = "import sys\nfrom tradewind.track import run_status\nprint(run_status(sys.argv[1]))"
    assert processes.finish(processes.start(code, tmp_path))[1].strip() == "running"
    run.log(2, {"loss": 2.5})
    run.close()
    assert open_metrics(tmp_path).series("loss").values.tolist() == [1.0, 2.5]


SIGNALLED = """
import os, signal, sys
from tradewind.track import Run, segments

run = Run.open(sys.argv[1], config={})
def stop(number, frame):
    run.close("stopped", "SIGTERM")
    print(run.is_closed)  # its rows are not on disk yet, so it must still own the directory
signal.signal(signal.SIGTERM, stop)

write = segments.SegmentWriter.write
def interrupted(self, rows):
    os.kill(os.getpid(), signal.SIGTERM)  # in the midst of a flush
    return write(self, rows)
segments.SegmentWriter.write = interrupted
run.log(1, {"loss": 1.0})
run.flush()
print(run.is_closed)
"""


def test_a_close_from_a_signal_handler_waits_for_the_flush(tmp_path: Path) -> None:
    code, out, err = processes.finish(processes.start(SIGNALLED, tmp_path))
    assert (code, out.split()) == (0, ["False", "True"]), err
    assert raw_record(tmp_path)["attempts"][0]["error"] == "SIGTERM"
    assert open_metrics(tmp_path).series("loss").values.tolist() == [1.0]


def test_a_run_refuses_pickle_and_copy(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="Run: cannot be pickled"):
                duplicate(run)


def test_log_goes_to_the_innermost_run(tmp_path: Path) -> None:
    assert current_run() is None
    with pytest.raises(RuntimeError, match=r"tradewind\.log: .*Run\.open"):
        track.log(loss=1.0)
    with Run.open(tmp_path / "outer", config={}) as outer:
        outer.log(5, {"loss": 1.0})
        with Run.open(tmp_path / "inner", config={}) as inner:
            assert current_run() is inner
            inner.step = 9
            track.log(accuracy=0.5)
        assert current_run() is outer
        track.log(accuracy=0.25)
    assert current_run() is None
    assert next(iter(open_metrics(tmp_path / "inner").series("accuracy")))[::2] == (9, 0.5)
    (row,) = open_metrics(tmp_path / "outer").rows()
    assert (row["step"], row["loss"], row["accuracy"]) == (5, 1.0, 0.25)


@pytest.mark.parametrize(
    ("config", "seed", "words"),
    [([1], None, "config"), (None, None, "config"), ({}, 1.5, "seed"), ({}, True, "seed")],
)
def test_bad_arguments_change_nothing(tmp_path: Path, config: Any, seed: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Run.open(tmp_path / "run", config=config, seed=seed)
    assert not (tmp_path / "run").exists()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "a" / "b"):
        with pytest.raises(NotADirectoryError, match="is a file; choose another path"):
            Run.open(path, config={})
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="empty path"):
        Run.open("", config={})


def test_a_path_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="may write to") as caught:
        Run.open(tmp_path, config={})
    assert caught.value.filename == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_path_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="mount it writable"):
        Run.open(tmp_path / "run", config={})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 1, "attempts": []}',
        '{"schema": 99, "attempts": [{}]}',
    ],
)
def test_a_foreign_record_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunRecordError, match=r"run\.json"):
        Run.open(tmp_path, config={})
    with pytest.raises(RunRecordError, match=r"run\.json"):
        read_run(tmp_path)
    assert (tmp_path / "run.json").read_text() == content
    assert not (tmp_path / "metrics").exists()
    (tmp_path / "run.json").unlink()
    Run.open(tmp_path, config={}).close()  # the refusal gave the lock back


def test_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(RunRecordError, match="expected a run directory"):
            run_status(path)
        with pytest.raises(RunRecordError, match="expected a run directory"):
            open_metrics(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file"]


def test_a_record_is_whole_whenever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.open(tmp_path, config={"attempt": "first"}).close()
    before = (tmp_path / "run.json").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"run\.json"):
        Run.open(tmp_path, config={})
    monkeypatch.undo()
    assert (tmp_path / "run.json").read_bytes() == before
    assert [each.name for each in tmp_path.glob(".*")] == [".lock"]


def test_files_have_ordinary_permissions(tmp_path: Path) -> None:
    with Run.open(tmp_path, config={}) as run:
        run.log(1, {"loss": 1.0})
    mask = os.umask(0)
    os.umask(mask)
    for path in (tmp_path / "run.json", tmp_path / "metrics" / "000001.jsonl"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_malformed_place_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ValueError, match="RANK"):
        Run.open(tmp_path / "run", config={})
    assert not (tmp_path / "run").exists()
