"""Shard files that retention freed, kept to be overwritten: twice the rate of new files.

A file comes here only from a commit whose manifest is gone durably, with one link and an exclusive
lock obtained: nothing that counts, no reader, no upload and no hard link sees it overwritten. It
leaves by a rename that is durable in both folders before a commit names it, so that it is never
in two places, not even after a power cut on a file system whose renames are not atomic.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence

from tradewind._core import native
from tradewind.checkpoint.locks import try_lock

SUFFIX = ".spare"  # not that of shards: readers of whole folders must not take them for such


class Spares:
    """The folder of spare files of one directory. Several processes may take from it."""

    def __init__(self, env: native.Env, folder: str, smallest_bytes: int) -> None:
        """Files below `smallest_bytes` are not worth it."""
        self._env = env
        self._folder = folder
        self._smallest_bytes = smallest_bytes

    def wanted(self, paths: Sequence[str]) -> list[str]:
        """Which of a retired commit's files should be `put`: at most as many as a save takes."""
        worthy = [path for path in paths if self._is_worthy(path)]
        return worthy[: max(0, len(paths) - len(self._files()))] if worthy else []

    def put(self, path: str) -> bool:
        """Take in the file at `path`, of a commit that is gone durably. False: it is in use."""
        lock = try_lock(self._env, path)
        if lock is None:
            return False
        with lock:
            if not self._is_worthy(path):
                return False
            target = os.path.join(self._folder, secrets.token_hex(8) + SUFFIX)
            if self._env.status(self._folder) is None:
                with contextlib.suppress(FileExistsError):
                    self._env.make_directory(self._folder)
            try:
                self._env.rename(path, target)
            except FileNotFoundError:
                return False  # an earlier owner that still lives moved it
        return True

    def take(self, path: str, size_bytes: int) -> bool:
        """Move the file whose size fits best to `path`; False where there is none."""
        if size_bytes < self._smallest_bytes:
            return False
        sizes = {name: self._size(name) for name in self._files()}
        for name in sorted(sizes, key=lambda each: abs(sizes[each] - size_bytes)):
            source = os.path.join(self._folder, name)
            lock = try_lock(self._env, source) if self._is_worthy(source) else None
            if lock is None:
                continue
            with lock:
                if not self._is_worthy(source):  # a hard link, or made anew by the lock
                    continue
                try:
                    self._env.rename(source, path)
                except FileNotFoundError:
                    continue  # another rank took it
            self._env.sync_directory(self._folder)
            return True
        return False

    def discard(self) -> None:
        """Remove all."""
        for name in self._files():
            with contextlib.suppress(FileNotFoundError):
                self._env.remove(os.path.join(self._folder, name))

    def _files(self) -> list[str]:
        try:
            names = self._env.list_directory(self._folder)
        except FileNotFoundError:
            return []
        return [name for name in names if name.endswith(SUFFIX)]

    def _size(self, name: str) -> int:
        status = self._env.status(os.path.join(self._folder, name))
        return status.size_bytes if status is not None else 0

    def _is_worthy(self, path: str) -> bool:
        status = self._env.status(path)
        return (
            status is not None
            and status.is_file
            and status.num_links == 1
            and status.size_bytes >= self._smallest_bytes
        )
