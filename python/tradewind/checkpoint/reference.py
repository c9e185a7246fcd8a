"""Commits as people name them: a directory or a URL means its newest one, `@STEP` behind it that of
a step, and a commit's own folder itself. For readers alone: nothing is claimed or written."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tradewind._core import native
from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.directory import CheckpointDirectory
from tradewind.checkpoint.errors import (
    DamagedCheckpointError,
    NoSuchCheckpointError,
    NotACheckpointDirectoryError,
)
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.manifest import Manifest
from tradewind.checkpoint.names import MARKER, CommitName
from tradewind.checkpoint.restoring import CommitReader
from tradewind.checkpoint.search import open_commit
from tradewind.checkpoint.stores.store import is_url, open_store

if TYPE_CHECKING:
    from tradewind.checkpoint.stores.remote_directory import RemoteDirectory

NUM_THREADS = 8
_AT_STEP = re.compile(r"(.+)@([0-9]{1,12})")
_IN_A_RUN = "checkpoints"


class Reference:
    """What a text such as `runs/a/checkpoints@300` means. A context manager: leaving it lets go of
    a store's connections.

    `directory`: where the commits are; `step`: the one that was asked for, None for the newest.
    A run's directory means its `checkpoints`.

    Raises NotACheckpointDirectoryError where the path is no directory of checkpoints, or not there;
    for a URL also what its store raises.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.step: int | None = None
        self._folder: CommitName | None = None
        where = text
        found = _AT_STEP.fullmatch(text)
        if found is not None and (is_url(text) or not os.path.exists(text)):
            where, self.step = found[1], int(found[2])
        self.directory: CheckpointDirectory = (
            self._remote(where) if is_url(where) else self._local(where)
        )

    def _remote(self, url: str) -> CheckpointDirectory:
        from tradewind.checkpoint.stores.remote_directory import RemoteDirectory

        directory = RemoteDirectory(open_store(url))
        directory.check()
        return directory

    def _local(self, path: str) -> CheckpointDirectory:
        path = os.path.abspath(path)
        if self.step is None:
            self._folder = CommitName.parse(os.path.basename(path))
        if self._folder is not None:
            path = os.path.dirname(path)
        inner = os.path.join(path, _IN_A_RUN)
        if not os.path.exists(os.path.join(path, MARKER)) and os.path.isdir(inner):
            path = inner
        if not os.path.exists(path):
            raise NotACheckpointDirectoryError(
                f"{path!r}: expected a directory of checkpoints, found nothing there"
            )
        directory = LocalDirectory(path)
        directory.check()
        return directory

    # --- commits --------------------------------------------------------------------------------

    def names(self) -> list[CommitName]:
        """The commits that are meant, newest first: all of them, those of the step, or the folder.

        Raises NoSuchCheckpointError where there is none."""
        committed = self.directory.committed()
        names = [name for name in committed if self.step in (None, name.step)]
        if self._folder is not None:
            names = [name for name in committed if name == self._folder]
        if not names:
            what = f"of step {self.step}" if self.step is not None else "that counts"
            steps = sorted({name.step for name in committed})
            there = f"there are steps {', '.join(map(str, steps))}" if steps else "there is none"
            raise NoSuchCheckpointError(
                f"{self.text}: expected a checkpoint {what}, found none; {there}"
            )
        return names

    def name(self) -> CommitName:
        """The newest of `names`."""
        return self.names()[0]

    def manifest(self, name: CommitName) -> Manifest:
        """Raises DamagedCheckpointError, also where it is that of another commit."""
        where = f"{self.directory.where}/{name.folder}"
        manifest = manifests.decode(self.directory.read_manifest(name), where)
        if (manifest.attempt, manifest.step, manifest.id) != (name.attempt, name.step, name.id):
            raise DamagedCheckpointError(
                f"{where}: its manifest is that of step {manifest.step}, attempt "
                f"{manifest.attempt}, {manifest.id}"
            )
        return manifest

    @contextlib.contextmanager
    def reader(self, name: CommitName) -> Iterator[CommitReader]:
        """Reads the commit, whose files nobody overwrites meanwhile. One of a store is brought to a
        temporary folder first, which takes its size on disk; TMPDIR says where."""
        with contextlib.ExitStack() as stack:
            if isinstance(self.directory, LocalDirectory):
                opener = open_commit(self.directory, native.posix_env(), NUM_THREADS)
                yield opener(name, stack)
            else:
                yield self._brought(name, stack)

    def _brought(self, name: CommitName, stack: contextlib.ExitStack) -> CommitReader:
        from tradewind.checkpoint.stores.download import fetch_files

        manifest = self.manifest(name)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tradewind-"))
        remote: RemoteDirectory = self.directory  # type: ignore[assignment]
        fetch_files(remote, name, manifest, folder)
        return CommitReader(native.posix_env(), folder, manifest, num_threads=NUM_THREADS)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: object) -> None:
        self.directory.close()
