"""Runs Python code that owns a run in another process, for tests of locks and of sudden ends."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def start(code: str, *arguments: Any) -> subprocess.Popen[str]:
    """Start `code`; sys.argv[1:] are `arguments`. It says what it reached by printed lines."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], deadline_s: float = 60.0) -> tuple[int, str, str]:
    """Wait for the end; exit code, output and errors. Raises TimeoutExpired after the deadline."""
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def next_line(process: subprocess.Popen[str]) -> str:
    """The next printed line; fails with the process's errors where it ended instead."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return line.strip()


def send_line(process: subprocess.Popen[str]) -> None:
    """Let a process that reads a line go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def finish_with_line(process: subprocess.Popen[str]) -> int:
    """Let the process go on, and wait for its exit code."""
    send_line(process)
    return finish(process)[0]
