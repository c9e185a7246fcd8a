"""The native Env: what it does to files, how it fails, and what a RecordingEnv writes down."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tradewind._core import native

posix = native.posix_env()
NOT_UTF8 = os.fsdecode(b"\xff-\xe9")


def holder(path: Path, *, exclusive: bool = True) -> subprocess.Popen[str]:
    """Another process that holds the lock from its first line of output to the end of its input."""
    code = f"""
import sys
from tradewind._core import native
lock = native.posix_env().lock_file(sys.argv[1], {exclusive})
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_there_is_one_posix_env() -> None:
    assert native.posix_env() is posix
    assert isinstance(native.RecordingEnv(), native.Env)


def test_files_are_written_read_moved_and_removed(tmp_path: Path) -> None:
    folder, path = tmp_path / "a" / "b", tmp_path / "a" / "b" / "file"
    posix.make_directories(str(folder))
    posix.make_directories(str(folder))
    posix.make_directory(str(folder / "c"))
    posix.write_file(str(path), b"longer than the next")
    posix.write_file(str(path), b"\0\xff", exclusive=False, sync=False)
    assert path.read_bytes() == posix.read_file(str(path), 2) == b"\0\xff"
    posix.rename(str(path), str(folder / "c" / "moved"))
    posix.sync_directory(str(folder))
    assert posix.list_directory(str(folder)) == ["c"]
    posix.remove(str(folder / "c" / "moved"))
    posix.remove_directory(str(folder / "c"))
    assert list(folder.iterdir()) == []


def test_status_is_that_of_os_stat(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    os.link(path, tmp_path / "link")
    status, expected = posix.status(str(path)), path.stat()
    assert status is not None
    assert (status.size_bytes, status.num_links) == (5, 2)
    assert (status.is_file, status.is_directory) == (True, False)
    assert status.file_id == (expected.st_dev, expected.st_ino)
    assert abs(status.modified_s - expected.st_mtime) < 1e-6  # a float64 of nanoseconds since 1970
    folder = posix.status(str(tmp_path))
    assert folder is not None
    assert (folder.is_file, folder.is_directory) == (False, True)
    assert posix.status(str(tmp_path / "none")) is None
    assert posix.status(str(path / "below")) is None


def test_names_that_are_not_utf8_come_through(tmp_path: Path) -> None:
    path = os.path.join(tmp_path, NOT_UTF8)
    posix.write_file(path, b"x")
    assert posix.list_directory(str(tmp_path)) == [NOT_UTF8]
    assert os.listdir(tmp_path) == [NOT_UTF8]
    with pytest.raises(FileExistsError) as caught:
        posix.write_file(path, b"y", exclusive=True)
    assert caught.value.filename == path
    recording = native.RecordingEnv()
    recording.rename(path, os.path.join(tmp_path, "é"))
    assert recording.operations()[0]["path"] == path


@pytest.mark.parametrize("bad", ["nul\0inside", 3, None])
def test_what_is_no_path_is_refused(bad: object) -> None:
    with pytest.raises(ValueError if isinstance(bad, str) else TypeError):
        posix.status(bad)  # type: ignore[arg-type]


FAILURES: dict[str, tuple[type[OSError], int, Callable[[str], object]]] = {
    "read": (FileNotFoundError, errno.ENOENT, lambda path: posix.read_file(path + "/none", 9)),
    "list": (FileNotFoundError, errno.ENOENT, lambda path: posix.list_directory(path + "/none")),
    "make": (FileExistsError, errno.EEXIST, lambda path: posix.make_directory(path)),
    "makes": (
        NotADirectoryError,
        errno.ENOTDIR,
        lambda path: posix.make_directories(path + "/file"),
    ),
    "exclusive": (
        FileExistsError,
        errno.EEXIST,
        lambda path: posix.write_file(path + "/file", b"", exclusive=True),
    ),
    "directory": (IsADirectoryError, errno.EISDIR, lambda path: posix.write_file(path, b"")),
    "rename": (FileNotFoundError, errno.ENOENT, lambda path: posix.rename(path + "/none", path)),
    "remove": (FileNotFoundError, errno.ENOENT, lambda path: posix.remove(path + "/none")),
    "not_empty": (OSError, errno.ENOTEMPTY, lambda path: posix.remove_directory(path)),
    "too_large": (OSError, errno.EFBIG, lambda path: posix.read_file(path + "/file", 3)),
    "sync": (NotADirectoryError, errno.ENOTDIR, lambda path: posix.sync_directory(path + "/file")),
    "lock": (FileNotFoundError, errno.ENOENT, lambda path: posix.lock_file(path + "/none", False)),
}


@pytest.mark.parametrize("case", FAILURES)
def test_errors_are_oserrors_with_errno_and_filename(tmp_path: Path, case: str) -> None:
    (tmp_path / "file").write_bytes(b"text")
    kind, number, call = FAILURES[case]
    with pytest.raises(kind) as caught:
        call(str(tmp_path))
    assert caught.value.errno == number
    assert str(caught.value.filename).startswith(str(tmp_path))
    assert os.strerror(number) in str(caught.value)


def test_a_lock_holds_between_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert posix.lock_file(str(path), True) is None
        assert posix.lock_file(str(path), False) is None
        other.kill()
        other.wait(60)
    with posix.lock_file(str(path), True) as lock:  # type: ignore[union-attr]
        assert posix.lock_file(str(path), True) is None
        lock.release()
        lock.release()
        again = posix.lock_file(str(path), True)
        assert again is not None
        again.release()


def test_readers_share_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"")
    with holder(path, exclusive=False) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert posix.lock_file(str(path), True) is None
        with posix.lock_file(str(path), False) as shared:  # type: ignore[union-attr]
            assert isinstance(shared, native.FileLock)
        other.communicate(timeout=60)
    assert posix.lock_file(str(path), True) is not None


def test_a_fork_neither_keeps_nor_ends_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    code = """
import os, sys
from tradewind._core import native
env = native.posix_env()
lock = env.lock_file(sys.argv[1], True)
from_child, to_parent = os.pipe()
from_parent, to_child = os.pipe()
if os.fork() == 0:
    lock.release()
    os.write(to_parent, b"held" if env.lock_file(sys.argv[1], True) is None else b"free")
    os.read(from_parent, 1)
    os._exit(0)
assert os.read(from_child, 4) == b"held"
lock.release()
print("free" if env.lock_file(sys.argv[1], True) else "held by the child")
os.write(to_child, b"x")
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "free\n", done.stderr


def test_the_record_has_every_change_with_its_data(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    old, new = str(tmp_path / "x" / "old"), str(tmp_path / "x" / "new")
    env.make_directories(str(tmp_path / "x"))
    env.write_file(old, b"text", exclusive=True)
    env.rename(old, new)
    env.sync_directory(str(tmp_path / "x"))
    assert env.read_file(new, 4) == b"text"
    lock = env.lock_file(new, True)
    assert lock is not None
    env.remove(new)
    rows = env.operations()
    assert [row["kind"] for row in rows] == [
        *["make_directory", "sync_directory", "create", "write", "sync", "rename"],
        *["sync_directory", "open", "lock", "remove"],
    ]
    folder, file = rows[0]["file"], rows[2]["file"]
    assert folder != file
    assert rows[3] == {
        "kind": "write",
        "path": old,
        "to": "",
        "file": file,
        "offset": 0,
        "size_bytes": 4,
        "data": b"text",
        "error": 0,
    }
    assert (rows[5]["path"], rows[5]["to"], rows[5]["file"]) == (old, new, file)
    assert rows[6]["file"] == folder
    assert [row["file"] for row in rows[7:]] == [file] * 3
    env.clear()
    assert env.operations() == []


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_any_call_can_fail(tmp_path: Path, index: int, error: int) -> None:
    env = native.RecordingEnv()
    env.inject(index, error=error)
    with pytest.raises(OSError, match=os.strerror(error)) as caught:
        env.write_file(str(tmp_path / "a"), b"text")
        env.rename(str(tmp_path / "a"), str(tmp_path / "b"))
        env.sync_directory(str(tmp_path))
    assert caught.value.errno == error
    rows = env.operations()
    kinds = ["create", "write", "sync", "rename", "sync_directory"]
    assert [row["kind"] for row in rows] == kinds[: index + 1]
    assert [row["error"] for row in rows] == [0] * index + [error]
    names = {0: [], 1: ["a"], 2: ["a"], 3: ["a"], 4: ["b"]}[index]
    assert posix.list_directory(str(tmp_path)) == names


def test_interrupts_and_short_writes_are_gone_over(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    for index in range(0, 12, 2):
        env.inject(index, error=errno.EINTR)
    env.inject(3, short_bytes=1)
    env.write_file(str(tmp_path / "a"), b"text")
    assert (tmp_path / "a").read_bytes() == b"text"
    assert [row["data"] for row in env.operations() if row["data"]] == [b"t", b"ext"]


def test_sticky_faults_hold_until_healed(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    env.inject(1, error=errno.ENOSPC, sticky=True)
    for name in ("a", "b", "c"):
        with pytest.raises(OSError, match="No space left on device"):
            env.write_file(str(tmp_path / name), b"text")
    assert posix.list_directory(str(tmp_path)) == ["a"]
    env.heal()
    env.write_file(str(tmp_path / "d"), b"text")
    assert posix.read_file(str(tmp_path / "d"), 4) == b"text"
    with pytest.raises(ValueError, match="injected fault: expected an index from 0"):
        env.inject(-1, error=errno.EIO)
    with pytest.raises(ValueError, match="injected fault"):
        env.inject(0)


def test_syncs_can_be_dropped(tmp_path: Path) -> None:
    env = native.RecordingEnv(keep_data=False)
    env.drop_syncs(files=True, directories=True)
    env.write_file(str(tmp_path / "a"), b"text")
    env.sync_directory(str(tmp_path))
    rows = env.operations()
    assert [(row["kind"], row["data"]) for row in rows] == [("create", b""), ("write", b"")]
    assert rows[1]["size_bytes"] == 4


def test_threads_are_recorded_in_one_order(tmp_path: Path) -> None:
    env = native.RecordingEnv()
    path = str(tmp_path / "a")

    def write(text: bytes) -> None:
        for _ in range(50):
            env.write_file(path, text, sync=False)

    threads = [threading.Thread(target=write, args=(bytes([65 + k]) * 9,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = bytearray()
    rows = env.operations()
    assert len(rows) == 2 * 4 * 50
    for row in rows:
        if row["kind"] == "write":
            content[row["offset"] : row["offset"] + row["size_bytes"]] = row["data"]
        else:
            assert row["kind"] == ("create" if row is rows[0] else "truncate")
            content.clear()
    assert (tmp_path / "a").read_bytes() == bytes(content)


def slow_crc32c(data: bytes) -> int:
    """RFC 3720, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_is_that_of_the_rfc() -> None:
    assert native.crc32c(b"123456789") == 0xE3069283
    assert native.crc32c(b"\0" * 32) == 0x8A9136AA
    data = bytes(i * i % 251 for i in range(13001))
    assert native.crc32c(data) == slow_crc32c(data)
    for cut in (0, 1, 4096, 13000, 13001):
        first, second = native.crc32c(data[:cut]), native.crc32c(data[cut:])
        assert native.crc32c(data[cut:], first) == native.crc32c(data)
        assert native.crc32c_combine(first, second, len(data) - cut) == native.crc32c(data)
    with pytest.raises(ValueError, match="expected 0 bytes or more, got -1"):
        native.crc32c_combine(1, 2, -1)
