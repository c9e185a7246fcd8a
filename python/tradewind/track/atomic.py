"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`, replacing what was there: temporary file, fsync, rename, fsync of the
    folder. Raises OSError that names `path`, with nothing changed there and no file left over."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_synced(temporary, data)
        os.rename(temporary, path)
    except OSError as error:
        _remove_quietly(temporary)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        _remove_quietly(temporary)
        raise
    _sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that a killed writer left. Only for the folder's sole writer."""
    for leftover in folder.glob(".*.tmp"):
        _remove_quietly(leftover)


def _write_synced(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`: os.write may take less, for example on a nearly full disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some network file systems do not open folders; the rename itself is done
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # the same file systems refuse fsync of a folder (EINVAL)
    finally:
        os.close(descriptor)


def _remove_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
