"""One live owner per directory and machine: an flock on `.lock`, the content of which names it.

A courtesy, not the safety: owners on other machines, or on a file system without locks, are told
apart by their attempts (claims.py). The kernel frees a killed owner's lock, and Env sees to it that
forked children (a loader's workers), which may outlive the owner, do not have it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
from datetime import datetime, timezone
from pathlib import Path

from tradewind._core import native
from tradewind.checkpoint.errors import DirectoryInUseError
from tradewind.checkpoint.locks import NO_LOCKS

_MAX_CONTENT_BYTES = 4096


class Owner:
    """The ownership of the directory `folder`. Not thread-safe."""

    def __init__(self, env: native.Env, folder: str, lock_path: str) -> None:
        self._env = env
        self._folder = folder
        self._path = lock_path
        self._lock: native.FileLock | None = None
        self._locks_exist = True

    def acquire(self) -> None:
        """Lock the directory, where that is not done yet. Raises DirectoryInUseError."""
        if self._lock is not None or not self._locks_exist:
            return
        try:
            self._lock = self._env.lock_file(self._path, exclusive=True)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self._locks_exist = False
            warnings.warn(
                f"checkpoint: the file system of {self._folder!r} has no locks ({error.strerror}): "
                "of two engines on it, only the one that began later can save",
                stacklevel=2,
            )
        if self._lock is None and self._locks_exist:
            raise _refusal(self._folder, _read(self._env, self._path))
        with contextlib.suppress(OSError):  # the name serves the text of a refusal only
            self._env.write_file(self._path, json.dumps(facts()).encode() + b"\n", sync=False)

    def release(self) -> None:
        """Let others in. Not in a forked child: it would unlock the parent's directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def facts() -> dict[str, object]:
    """What tells this process from any other, as JSON members. `started` is for people alone."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": _text("/proc/sys/kernel/random/boot_id"),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def describe(owner: dict[str, object]) -> str:
    """`owner` (what `facts` gave) in a message."""
    return (
        f"host {owner.get('host', 'unknown')}, pid {owner.get('pid', 'unknown')}, "
        f"started {owner.get('started', 'unknown')}"
    )


def parse(data: bytes) -> dict[str, object]:
    """What `facts` gave, or nothing where the file is not whole."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_this_process(owner: dict[str, object]) -> bool:
    mine = facts()
    return all(owner.get(key) == mine[key] for key in ("host", "boot_id", "pid"))


def _read(env: native.Env, path: str) -> dict[str, object]:
    try:
        return parse(env.read_file(path, _MAX_CONTENT_BYTES))
    except OSError:
        return {}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _refusal(folder: str, owner: dict[str, object]) -> DirectoryInUseError:
    who = "this process" if _is_this_process(owner) else "another process"
    return DirectoryInUseError(
        f"checkpoint directory {folder!r} is in use by {who}: {describe(owner)}; wait for it, "
        "close that one, or choose another directory"
    )
