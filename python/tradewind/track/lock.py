"""One live owner per run directory: a POSIX record lock on RUN/.lock plus a registry per process.

POSIX locks belong to the process: a forked data worker neither keeps nor drops the parent's, and
the kernel frees a killed owner's. They are also dropped when the process closes *any* descriptor
of the file, so this module never opens .lock twice in the owner's process: the registry answers
there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from tradewind.track.atomic import write_all

_LOCK_NAME = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_HELD = {errno.EACCES, errno.EAGAIN}
# A reader that asks holds a shared lock for microseconds: an opener that meets it tries again.
_ATTEMPTS, _PAUSE_S = 5, 0.02

_FolderKey = tuple[int, int]
_live: dict[_FolderKey, tuple[int, str]] = {}  # folder → (pid, when it was opened)


class RunLockedError(RuntimeError):
    """The run directory has a live owner."""


class RunLock:
    """The exclusive ownership of a run directory, from construction to `release()`."""

    def __init__(self, folder: Path, started: str) -> None:
        """Take the lock of `folder`. Raises RunLockedError that names the owner, or OSError."""
        self._pid = os.getpid()
        self._key = _folder_key(folder)
        _register(self._key, folder, started)
        try:
            self._descriptor = _acquire(folder)
        except BaseException:
            _live.pop(self._key, None)
            raise
        _write_owner(self._descriptor, started)

    def release(self) -> None:
        """Give the directory back; does nothing in a forked child or when called again."""
        if os.getpid() != self._pid or self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)  # closing drops the lock
        _live.pop(self._key, None)


def is_owned(folder: Path) -> bool:
    """Whether a live process owns `folder`. Never disturbs the owner's lock."""
    try:
        owner = _live.get(_folder_key(folder))
        if owner is not None and owner[0] == os.getpid():
            return True
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD
    finally:
        os.close(descriptor)
    return False


def _register(key: _FolderKey, folder: Path, started: str) -> None:
    owner = _live.get(key)
    if owner is not None and owner[0] != os.getpid():
        _live.pop(key, None)  # a parent's entry, copied by fork: the lock file decides
    claim = (os.getpid(), started)
    owner = _live.setdefault(key, claim)  # atomic under the GIL: of two threads, one wins
    if owner is not claim:
        facts = {"host": socket.gethostname(), "pid": owner[0], "started": owner[1]}
        raise _refusal(folder, facts, "this process")


def _acquire(folder: Path) -> int:
    path = folder / _LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _warn_unlocked(path, error)
                    return descriptor
                if error.errno not in _HELD:
                    raise
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_PAUSE_S)
        raise _refusal(folder, _read_owner(descriptor), "another process")
    except BaseException:
        os.close(descriptor)
        raise


def _write_owner(descriptor: int, started: str) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
    try:
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_all(descriptor, json.dumps(owner).encode() + b"\n")
    except OSError:
        pass  # the owner's name only serves the refusal's text; the lock is held


def _read_owner(descriptor: int) -> dict[str, object]:
    try:
        value = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _refusal(folder: Path, owner: Mapping[str, object], who: str) -> RunLockedError:
    return RunLockedError(
        f"run directory {str(folder)!r} is in use by {who}: host {owner.get('host', 'unknown')}, "
        f"pid {owner.get('pid', 'unknown')}, started {owner.get('started', 'unknown')}; wait for "
        "it, close that run, or choose another directory (of several ranks, only rank 0 opens it)"
    )


def _warn_unlocked(path: Path, error: OSError) -> None:
    warnings.warn(
        f"run: the file system of {str(path)!r} has no locks ({error.strerror}): a second writer "
        "of this run directory would not be noticed",
        stacklevel=2,
    )


def _folder_key(folder: Path) -> _FolderKey:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
