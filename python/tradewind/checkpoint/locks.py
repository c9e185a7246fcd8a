"""Locks of shard files: who reads or uploads one holds the shared lock; nobody overwrites it."""

from __future__ import annotations

import errno

from tradewind._core import native

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOENT)


def try_lock(env: native.Env, path: str) -> native.FileLock | None:
    """The exclusive lock of an existing file. None: somebody reads it, or the file system has no
    locks and cannot say."""
    try:
        return env.lock_file(path, exclusive=True)
    except OSError as error:
        if error.errno in NO_LOCKS or error.errno in _REFUSED:
            return None
        raise


def lock_shared(env: native.Env, path: str) -> native.FileLock | None:
    """A reader's lock of an existing file; None where the file system has none, or where an owner
    has just freed the file. Raises FileNotFoundError."""
    try:
        return env.lock_file(path, exclusive=False)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
