"""A store behind a local directory: commits are made on the local disk, which is fast, and uploaded
behind training; what is restored is the newest of both.

One numbering of attempts for both: the store's claims decide who may commit, also which commits of
the local directory count. So a machine that comes back with commits that its successor never saw
does not go on from them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.claims import Acceptance
from tradewind.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    DirectoryInUseError,
    VanishedCheckpointError,
)
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.download import fetch_files, read_checked_manifest
from tradewind.checkpoint.stores.patience import Patience
from tradewind.checkpoint.stores.remote_directory import RemoteDirectory
from tradewind.checkpoint.stores.store import NUM_THREADS, PART_BYTES, Contents, open_store
from tradewind.checkpoint.stores.upload_handle import Upload
from tradewind.checkpoint.stores.uploader import Uploader

OnEvent = Callable[[str, str], None]

TRANSFER_DEADLINE = timedelta(hours=1)


class RemoteTier:
    """The store at `url` behind the directory `local`. Of one process: rank 0 of those that save
    together.

    Args:
        keep, keep_every: what retention leaves, in the store as in the directory.
        deadline: of one upload with all its retries, and of bringing one commit back.
        options: for `boto3.client("s3", ...)` or `fsspec.filesystem(scheme, ...)`; JSON values.
        on_event: called with (kind, text), from any thread.

    Nothing is asked of the store before `check`. Raises ValueError for what is no URL, ImportError
    naming what to install, StoreError for credentials that cannot be read.
    """

    def __init__(
        self,
        url: str,
        local: LocalDirectory,
        *,
        keep: int,
        keep_every: int | None,
        on_event: OnEvent,
        deadline: timedelta = TRANSFER_DEADLINE,
        patience: Patience | None = None,
        options: dict[str, Any] | None = None,
        part_bytes: int = PART_BYTES,
        num_threads: int = NUM_THREADS,
        first_pause: timedelta = timedelta(seconds=5),
    ) -> None:
        if url.startswith("memory://"):
            raise ValueError(
                f"checkpoint: {url!r}: memory is gone when this process is; give a store that stays"
            )
        self._local = local
        self._keep_every = keep_every
        self._deadline = deadline
        self._part_bytes, self._num_threads = part_bytes, num_threads
        self._on_event = on_event
        store = open_store(
            url, patience=patience, part_bytes=part_bytes, num_threads=num_threads, options=options
        )
        self.remote = RemoteDirectory(store)
        self._uploader: Uploader | None = None
        self._settings: dict[str, Any] = {
            "keep": keep,
            "keep_every": keep_every,
            "deadline": deadline,
            "patience": patience,
            "part_bytes": part_bytes,
            "num_threads": num_threads,
            "options": options,
            "first_pause": first_pause,
        }
        self._submitted_s: dict[CommitName, float] = {}
        self._told_ignored: set[CommitName] = set()
        self.durable: tuple[int, float] | None = None  # (step, time.monotonic()) in the store
        self.upload_s = 0.0  # from the last commit that arrived to its arrival

    @property
    def where(self) -> str:
        return self.remote.where

    def check(self) -> None:
        """Whether the place in the store is one of checkpoints, and may be read. Touches nothing.

        Raises NotACheckpointDirectoryError, NewerVersionError, StoreError."""
        self.remote.check()

    # --- owning ---------------------------------------------------------------------------------

    def own(self) -> None:
        """Claim the next attempt in store and directory, and upload what the directory alone has.

        Raises DirectoryInUseError before the store is touched, StoreError."""
        if self._uploader is not None:
            return
        self._local.lock()
        self.remote.check()
        self._obey(self.remote.acceptance())
        here = self._local.committed()
        attempt = self.remote.claim(self._local.newest_attempt() + 1, here)
        self._local.claim(at_least=attempt)
        self._uploader = Uploader(
            self.where, **self._settings, on_event=self._on_event, on_done=self._uploaded
        )
        self._uploader.own(attempt, self.remote.accepted)
        self._catch_up(here)

    def _catch_up(self, here: Sequence[CommitName]) -> None:
        """A commit that an earlier owner on this machine made, and did not live to upload."""
        there = self.remote.committed()
        if not here or (there and here[0] <= there[0]):
            return
        try:
            manifest = self._local.read_manifest(here[0])
            files = manifests.decode(manifest, self._local.path_of(here[0])).files
        except (CheckpointError, OSError) as error:
            self._on_event("upload-failed", f"upload of step {here[0].step}: {error}")
            return
        self.upload(here[0], files, manifest)

    def _obey(self, acceptance: Acceptance) -> None:
        """Let the store's claims decide in the directory, too."""
        before = self._local.committed()
        self._local.outer = acceptance
        ignored = [n for n in before if not acceptance.counts(n) and n not in self._told_ignored]
        if ignored:
            self._told_ignored.update(ignored)
            steps = ", ".join(str(name.step) for name in sorted(ignored))
            self._on_event(
                "passed-over",
                f"step {steps} of {self._local.where} is not gone on from: attempt "
                f"{acceptance.attempt} went on without it, from what {self.where} had",
            )

    # --- uploading ------------------------------------------------------------------------------

    def upload(self, name: CommitName, files: Sequence[Contents], manifest: bytes) -> Upload:
        """Upload what was just committed in the directory; before its retention runs. Returns at
        once; what fails is an event, and `.wait()` raises it."""
        is_milestone = self._keep_every is not None and name.step % self._keep_every == 0
        folder = self._local.path_of(name)
        self._submitted_s[name] = time.monotonic()
        try:
            if self._uploader is None:
                raise CheckpointError(f"{self.where}: not owned by this process")
            return self._uploader.submit(name, folder, files, manifest, gives_way=not is_milestone)
        except (OSError, RuntimeError) as error:
            self._on_event("upload-failed", f"upload of step {name.step}: {error}")
            return Upload.failed(name, error)

    def _uploaded(self, upload: Upload) -> None:
        """From the uploader's thread, however it ended."""
        began_s = self._submitted_s.pop(upload.name, None)
        if upload.error is None and upload.successor is None:
            now_s = time.monotonic()
            self.durable = (upload.name.step, now_s)
            if began_s is not None:
                self.upload_s = now_s - began_s

    # --- restoring ------------------------------------------------------------------------------

    def committed(self) -> list[CommitName]:
        """The commits that count in either place, the newest first. Raises StoreError."""
        self._obey(self.remote.acceptance())
        return sorted({*self._local.committed(), *self.remote.committed()}, reverse=True)

    def bring(self, step: int | None = None) -> None:
        """Have the newest commit, or the newest of `step`, in the directory. Damaged ones of the
        store are passed over with an event.

        Raises StoreError where the store does not answer: what is in the directory may not be the
        newest then."""
        self.remote.check()
        self._obey(self.remote.acceptance())
        here = [n for n in self._local.committed() if step is None or n.step == step]
        for name in self.remote.committed():
            if step is not None and name.step != step:
                continue
            if here and name <= here[0]:
                return
            try:
                self._fetch(name)
            except DirectoryInUseError:
                return  # by a process that saves there what is newer
            except (DamagedCheckpointError, VanishedCheckpointError) as error:
                self._on_event("passed-over", f"{name.folder} is passed over: {error}")
                continue
            return

    def repair(self, name: CommitName, why: str) -> bool:
        """Bring a commit to the directory, in place of a copy that was refused for `why`. Whether
        it is whole there now; either is an event, unless the store does not have it."""
        try:
            if name not in self.remote.committed():
                return False
            self._fetch(name)
        except (CheckpointError, OSError) as error:
            self._on_event("passed-over", f"{name.folder}: nor is it whole in the store: {error}")
            return False
        self._on_event("repaired", f"{name.folder} was brought from the store anew: {why}")
        return True

    def _fetch(self, name: CommitName) -> None:
        manifest, data = read_checked_manifest(self.remote, name)
        self._local.adopt(
            name,
            data,
            lambda folder: fetch_files(
                self.remote,
                name,
                manifest,
                folder,
                deadline=self._deadline,
                part_bytes=self._part_bytes,
                num_threads=self._num_threads,
            ),
        )

    # --- the end --------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait so long for uploads, None: as long as one may take, then let go."""
        if self._uploader is not None:
            self._uploader.close(self._deadline.total_seconds() if timeout_s is None else timeout_s)
        self.remote.close()


def default_directory(url: str) -> str:
    """The local tier of a URL where none was given: the same for every run on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return str(Path(cache) / "tradewind" / "checkpoints" / digest)
