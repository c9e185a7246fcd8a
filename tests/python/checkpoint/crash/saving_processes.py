"""Real processes that save, forked from one that has loaded everything, so that many can be killed.

Run as a program it is that one. For each line "KIND PATH FIRST COUNT" on its input it forks a
child, which says "pid N", waits for a line, saves COUNT steps from FIRST on, saying "saved STEP" or
"failed STEP NAME" after each; then it says "ended STATUS" (of os.waitpid)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)

KINDS = ("plain", "checkpointer")


class SavingProcesses:
    """The program, as the tests use it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, kind: str, path: Path, first: int, count: int) -> int:
        """A child that waits for `go`; returns its process id."""
        self._say(f"{kind} {path} {first} {count}")
        word, pid = self._words()
        assert word == "pid"
        return int(pid)

    def go(self) -> None:
        """Let the child save."""
        self._say("go")

    def next(self) -> list[str]:
        """The next line, in words."""
        return self._words()

    def finish(self) -> tuple[list[int], list[str], int]:
        """Steps that were acknowledged, names of errors of those that failed, status of the end."""
        saved: list[int] = []
        failed: list[str] = []
        while True:
            words = self._words()
            if words[0] == "saved":
                saved.append(int(words[1]))
            elif words[0] == "failed":
                failed.append(words[2])
            else:
                assert words[0] == "ended", words
                return saved, failed, int(words[1])

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _words(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the saving process ended: {self._process.poll()}"
        return line.split()


def _serve() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from checkpoint.crash.checkpointer_saver import CheckpointerSaver
    from checkpoint.crash.savers import PlainSaver

    from tradewind.checkpoint import local_directory

    local_directory.RECYCLED_FROM_BYTES = 1
    makes = dict(zip(KINDS, (PlainSaver, CheckpointerSaver), strict=True))
    while line := _line():
        kind, path, first, count = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                _save(makes[kind], Path(path), int(first), int(count))
            finally:
                os._exit(3)
        print(f"ended {os.waitpid(pid, 0)[1]}", flush=True)


def _save(make, path: Path, first: int, count: int) -> None:  # type: ignore[no-untyped-def]
    from tradewind._core import native

    # Where only parents may trace (Yama), anyone may trace this one.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY)
    saver = make(path, native.posix_env())
    print(f"pid {os.getpid()}", flush=True)
    _line()
    for step in range(first, first + count):
        try:
            saver.save(step)
        except Exception as error:
            print(f"failed {step} {type(error).__name__}", flush=True)
        else:
            print(f"saved {step}", flush=True)
    saver.close()
    os._exit(0)


def _line() -> str:
    """A line of input, unbuffered: parent and child read the same pipe in turns."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        line += byte
    return line.decode()


if __name__ == "__main__":
    _serve()
