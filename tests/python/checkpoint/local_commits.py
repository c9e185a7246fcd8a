"""Commits of a few bytes in a LocalDirectory, for tests of the directory itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import CommitName, shard_name

SHARD = shard_name(0, 1)


def commit(directory: LocalDirectory, step: int, data: bytes = b"bytes of a shard") -> CommitName:
    """One save from begin to publish; its shard is `data`."""
    name = directory.begin(step)
    directory.env.write_file(directory.path_of(name, SHARD), data)
    directory.publish(name, b"manifest of %d" % step)
    return name


def steps_of(directory: LocalDirectory) -> list[int]:
    """The committed steps, newest first."""
    return [name.step for name in directory.committed()]


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything below `folder`: contents, modes and times of change."""
    found: dict[str, Any] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found
