"""The trainer's side of the upload process: one thread that hands it one commit after another.

What is handed over is open and locked from `submit` on: retention may unlink the files meanwhile,
but not overwrite them. Uploads that have not begun give way to newer ones; one that fails because
the store does not answer is tried again until it succeeds, a newer one comes, or its time is up.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from tradewind.checkpoint.claims import Acceptance
from tradewind.checkpoint.errors import FencedError
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.patience import Deadline, Patience, StoreError
from tradewind.checkpoint.stores.store import NUM_THREADS, PART_BYTES, Contents
from tradewind.checkpoint.stores.upload import opening
from tradewind.checkpoint.stores.upload_handle import Upload, in_memory
from tradewind.checkpoint.stores.upload_process import ProcessEnded, UploadProcess

_FIRST_PAUSE = timedelta(seconds=5)
_LONGEST_PAUSE_S = 300.0
_MAX_RESTARTS = 3  # of the process, for one upload
_GRACE_S = 30.0  # after a deadline, in which the process itself says what is stuck


class Uploader:
    """Uploads to the store at `url`, in a process that starts now.

    Args:
        keep, keep_every: what retention leaves in the store.
        deadline: of one upload with all its retries.
        on_event: called from the uploader's thread with (kind, text): "upload-delayed",
            "upload-restarted", "upload-failed", "remote-retention-failed".
        on_done: called from any thread with each upload that has ended, one way or the other.

    Thread-safe. Ends with `close()`, or with the trainer.
    """

    def __init__(
        self,
        url: str,
        *,
        keep: int,
        keep_every: int | None = None,
        deadline: timedelta = timedelta(hours=1),
        patience: Patience | None = None,
        part_bytes: int = PART_BYTES,
        num_threads: int = NUM_THREADS,
        options: dict[str, Any] | None = None,
        first_pause: timedelta = _FIRST_PAUSE,
        on_event: Callable[[str, str], None] = lambda kind, text: None,
        on_done: Callable[[Upload], None] = lambda upload: None,
    ) -> None:
        self.url = url
        self._keep, self._keep_every = keep, keep_every
        self._deadline = deadline
        self._first_pause_s = first_pause.total_seconds()
        self._on_event, self._on_done = on_event, on_done
        self._attempt = 0
        self._acceptance = Acceptance()
        self._process = UploadProcess(
            opening(url, patience or Patience(), part_bytes, num_threads, options or {})
        )
        self._changed = threading.Condition()
        self._waiting: deque[Upload] = deque()
        self._running: Upload | None = None
        self._is_closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tradewind-uploader")
        self._thread.start()
        _live.add(self)

    @property
    def process_id(self) -> int | None:
        """Of the upload process; another one after it was restarted, None in between."""
        return self._process.process_id

    def own(self, attempt: int, acceptance: Acceptance) -> None:
        """Commit as the owner `attempt` of the store; before the first `submit`."""
        self._attempt, self._acceptance = attempt, acceptance

    def submit(
        self,
        name: CommitName,
        folder: str | os.PathLike[str],
        files: Sequence[Contents],
        manifest: bytes,
        *,
        gives_way: bool = True,
    ) -> Upload:
        """Take over the commit in `folder`, and return.

        Args:
            files: the shards, as the manifest names them.
            gives_way: False: it is uploaded even if a newer one is submitted before it has begun.

        Raises OSError where a file cannot be opened, or is being overwritten.
        """
        upload = Upload(name, gives_way=gives_way)
        upload.hold(folder, files, manifest)
        with self._changed:
            if self._is_closing:
                upload.release()
                raise RuntimeError(f"{self.url}: this uploader is closed")
            left: deque[Upload] = deque()
            for older in self._waiting:
                if older.gives_way:
                    self._replace(older, upload)
                else:
                    left.append(older)
            self._waiting = left
            self._waiting.append(upload)
            self._changed.notify_all()
        return upload

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether, after at most that time, nothing is waiting or under way."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._running is None, timeout_s
            )

    def close(self, timeout_s: float = 0.0) -> None:
        """Wait so long for what is under way, then end the process. Uploads that are not done fail;
        their commits are still on the local disk. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self.wait(timeout_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._process.end()
        self._thread.join(_GRACE_S)
        _live.discard(self)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    for upload in self._waiting:
                        self._end(upload, self._closed_error(upload))
                    self._waiting.clear()
                    return
                upload = self._running = self._waiting.popleft()
            try:
                self._bring(upload)
            except Exception as error:
                self._tell("upload-failed", upload, str(error))
                self._end(upload, error)

    def _bring(self, upload: Upload) -> None:
        """Until it is there, it gave way, or its time is up. Raises why it failed."""
        deadline = Deadline(self._deadline)
        pause_s = self._first_pause_s
        num_ended = 0
        again = False
        while True:
            try:
                answer = self._try(upload, deadline, again=again)
                if "error" not in answer:
                    upload.bytes, upload.duration_s = answer["bytes"], answer["duration_s"]
                    self._end(upload)
                    self._retain(upload)
                    return
                error = _error_of(answer)
                if not getattr(error, "transient", False) or deadline.has_passed:
                    raise error
                self._tell("upload-delayed", upload, str(error))
            except ProcessEnded as ended:
                num_ended += 1
                if self._is_closing:
                    raise self._closed_error(upload) from ended
                if num_ended > _MAX_RESTARTS:
                    raise StoreError(
                        f"{self.url}: upload of step {upload.name.step}: {ended}, {num_ended} "
                        "times; is its memory limited?"
                    ) from ended
                self._tell("upload-restarted", upload, str(ended))
            again = True
            if self._rest(upload, min(pause_s, deadline.remaining_s)):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _rest(self, upload: Upload, pause_s: float) -> bool:
        """Pause before the next try. True: a newer upload takes its place."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closing or (upload.gives_way and self._waiting), pause_s
            )
            if self._is_closing:
                raise self._closed_error(upload)
            if upload.gives_way and self._waiting:
                self._replace(upload, self._waiting[-1])
                return True
        return False

    def _try(self, upload: Upload, deadline: Deadline, *, again: bool) -> dict[str, Any]:
        self._process.begin(self._own)
        message = {
            "do": "upload",
            **_named(upload.name),
            "again": again,
            "deadline_s": max(deadline.remaining_s, 0.001),
        }
        try:
            return self._process.exchange(
                message, upload.descriptors, deadline.remaining_s + _GRACE_S
            )
        except TimeoutError:
            self._process.end(for_good=False)
            raise StoreError(
                f"{self.url}: upload of step {upload.name.step}: the upload process said nothing "
                f"within {deadline.limit.total_seconds():g} s and was ended; is the disk or the "
                "store stuck, or the deadline too short?"
            ) from None

    def _retain(self, upload: Upload) -> None:
        """Afterwards, when nobody waits for it. A failure is made up for by the next one."""
        message = {
            "do": "retain",
            **_named(upload.name),
            "keep": self._keep,
            "keep_every": self._keep_every,
        }
        try:
            answer = self._process.exchange(message, (), self._deadline.total_seconds())
            if "error" in answer:
                raise _error_of(answer)
        except (OSError, RuntimeError, ProcessEnded) as error:  # TimeoutError is an OSError
            if isinstance(error, TimeoutError):
                self._process.end(for_good=False)
            if not self._is_closing:
                self._tell("remote-retention-failed", upload, str(error))

    def _own(self) -> None:
        """What a process that has just started has to know."""
        accepted = in_memory(json.dumps(sorted(self._acceptance.folders)).encode())
        try:
            message = {"do": "own", "attempt": self._attempt}
            answer = self._process.exchange(message, [accepted], _GRACE_S)
        except TimeoutError:
            self._process.end(for_good=False)
            raise ProcessEnded("the upload process did not come up") from None
        finally:
            os.close(accepted)
        if "error" in answer:
            raise _error_of(answer)

    def _closed_error(self, upload: Upload) -> StoreError:
        return StoreError(
            f"{self.url}: upload of step {upload.name.step} was given up when the Checkpointer was "
            "closed; the local directory has it, and the next run on this machine uploads it"
        )

    def _replace(self, older: Upload, newer: Upload) -> None:
        older.successor = newer
        self._end(older)

    def _end(self, upload: Upload, error: Exception | None = None) -> None:
        upload.error = error
        with suppress(Exception):
            self._on_done(upload)
        upload.end(error)

    def _tell(self, kind: str, upload: Upload, text: str) -> None:
        with suppress(Exception):
            self._on_event(kind, f"upload of step {upload.name.step}: {text}")


def _named(name: CommitName) -> dict[str, Any]:
    return {"attempt": name.attempt, "step": name.step, "commit_id": name.id}


def _error_of(answer: dict[str, Any]) -> Exception:
    text = answer["error"]
    if answer["kind"] == "fenced":
        return FencedError(text)
    if answer["kind"] == "import":
        return ImportError(text)
    return StoreError(text, transient=answer["transient"])


_live: weakref.WeakSet[Uploader] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child (a loader's worker) must not keep files or the process's socket open."""
    for uploader in list(_live):
        uploader._process.forget()
        uploads = [*uploader._waiting, *([uploader._running] if uploader._running else [])]
        for upload in uploads:
            for descriptor in upload.descriptors:
                with suppress(OSError):
                    os.close(descriptor)
            upload.descriptors = []
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)

__all__ = ["Upload", "Uploader"]
