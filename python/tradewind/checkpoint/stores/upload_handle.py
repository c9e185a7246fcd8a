"""One commit on its way to a store: what waits for it, and the files it holds."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tradewind.checkpoint.locks import NO_LOCKS
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.store import Contents


class Upload:
    """One commit on its way. Any thread may read it and wait for it.

    `name`; `is_done`; `error`: why it did not arrive, None otherwise; `bytes` of its shards and
    `duration_s`, once it is there; `successor`: the newer upload that took its place.
    """

    def __init__(self, name: CommitName, *, gives_way: bool = True) -> None:
        self.name = name
        self.gives_way = gives_way
        self.error: Exception | None = None
        self.bytes = 0
        self.duration_s = float("nan")
        self.successor: Upload | None = None
        self._done = threading.Event()
        self.descriptors: list[int] = []

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def has_arrived(self) -> bool:
        """Whether the commit, or the newer one that took its place, is in the store."""
        upload = self
        while upload.is_done and upload.successor is not None:
            upload = upload.successor
        return upload.is_done and upload.error is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the commit, or the newer one that took its place, is in the store.

        Raises the error it failed with, or TimeoutError after `timeout_s` seconds."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        upload: Upload = self
        while True:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if not upload._done.wait(left_s):
                raise TimeoutError(
                    f"upload of step {self.name.step}: not done after {timeout_s:g} s; it goes on"
                )
            if upload.successor is None:
                break
            upload = upload.successor
        if upload.error is not None:
            raise upload.error

    @classmethod
    def failed(cls, name: CommitName, error: Exception) -> Upload:
        """One that could not begin."""
        upload = cls(name)
        upload.end(error)
        return upload

    # --- for the uploader -----------------------------------------------------------------------

    def hold(
        self, folder: str | os.PathLike[str], files: Sequence[Contents], manifest: bytes
    ) -> None:
        """Open and lock the files: from now on no retention overwrites them. What the process is
        told of them, and the manifest, come first. Raises OSError; nothing is held then."""
        try:
            self.descriptors.append(in_memory(json.dumps(_told(files)).encode()))
            self.descriptors.append(in_memory(manifest))
            for file in files:
                self.descriptors.append(_open_locked(os.path.join(folder, file.name)))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for descriptor in self.descriptors:
            with suppress(OSError):
                # A child forked meanwhile may share it, and must not go on holding the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        self.descriptors = []

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.release()
        self._done.set()


def _told(files: Sequence[Contents]) -> list[dict[str, Any]]:
    return [
        {
            "name": file.name,
            "size_bytes": file.size_bytes,
            "crc32c": file.crc32c,
            "block_bytes": file.block_bytes,
            "block_crc32c": file.block_crc32c.hex(),
        }
        for file in files
    ]


def in_memory(data: bytes) -> int:
    """A descriptor of `data`, of any size, which a message's limit does not bind."""
    descriptor = os.memfd_create("tradewind-upload")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_locked(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(descriptor)
            error.filename = path
            raise
    return descriptor
