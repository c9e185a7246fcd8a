"""The folders of commits in a local directory: which are there, and how one is taken away."""

from __future__ import annotations

import contextlib
import errno
import os

from tradewind._core import native
from tradewind.checkpoint.names import MANIFEST, CommitName, parse_shard
from tradewind.checkpoint.spares import Spares

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_TEMPORARY = ".tmp"


class CommitFolders:
    """The folders in the directory `path`. Files that are none of ours stay where they are."""

    def __init__(self, env: native.Env, path: str, spares: Spares) -> None:
        self._env = env
        self._path = path
        self._spares = spares

    def path_of(self, name: CommitName, file_name: str | None = None) -> str:
        """The path of a folder, or of a file in it."""
        folder = os.path.join(self._path, name.folder)
        return folder if file_name is None else os.path.join(folder, file_name)

    def names(self) -> list[CommitName]:
        """All folders of saves, in any order, whether they are commits or not."""
        try:
            entries = self._env.list_directory(self._path)
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise
        return [name for entry in entries if (name := CommitName.parse(entry)) is not None]

    def is_published(self, name: CommitName) -> bool:
        """Whether the folder has a manifest."""
        try:
            status = self._env.status(self.path_of(name, MANIFEST))
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        return status is not None and status.is_file

    def remove(self, name: CommitName) -> None:
        """Take the folder away, the manifest durably first. Whoever still writes there fails."""
        with contextlib.suppress(FileNotFoundError):  # another owner removes it, too
            files = self._env.list_directory(self.path_of(name))
            if MANIFEST in files:
                self._remove_file(name, MANIFEST)
                self._env.sync_directory(self.path_of(name))
            self._remove_rest(name, files)

    def retire(self, name: CommitName) -> None:
        """Take the folder of a commit away; files that a next save can overwrite become spares."""
        with contextlib.suppress(FileNotFoundError):
            files = self._env.list_directory(self.path_of(name))
            if MANIFEST in files:
                self._remove_file(name, MANIFEST)
            shards = {self.path_of(name, file): file for file in files if parse_shard(file)}
            freed = self._spares.wanted(list(shards))
            if freed:
                self._env.sync_directory(self.path_of(name))
            moved = {shards[path] for path in freed if self._spares.put(path)}
            self._remove_rest(name, [file for file in files if file not in moved])

    def _remove_rest(self, name: CommitName, files: list[str]) -> None:
        for file in files:
            if parse_shard(file) or file.endswith(_TEMPORARY):
                self._remove_file(name, file)
        try:
            self._env.remove_directory(self.path_of(name))
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise

    def _remove_file(self, name: CommitName, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._env.remove(self.path_of(name, file))
