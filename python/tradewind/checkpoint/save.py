"""The handle of one save: what `Checkpointer.save` returns at once and the writing thread ends."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tradewind._core import native
from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.staging import DeviceCopies

if TYPE_CHECKING:
    from tradewind.checkpoint.stores.upload_handle import Upload


class Save:
    """One save. Any thread may read it and wait for it.

    `step`; `in_place_bytes` written from where they lie and `copied_bytes` copied before `save()`
    returned (of this rank); `stall_s`: how long `save()` held its caller; `durable_s`: from the
    call to the commit, NaN before; `waited_s`: for which updates have waited for it; `name`: its
    folder, once it is committed; `is_done`; `error`: why it failed, None otherwise. Of a
    Checkpointer of a URL all but `wait` and `is_durable` tell of the local directory.
    """

    def __init__(self, step: int, *, is_paranoid: bool = False) -> None:
        self.step = step
        self._is_paranoid = is_paranoid
        self.in_place_bytes = 0
        self.copied_bytes = 0
        self.stall_s = 0.0
        self.durable_s = float("nan")
        self.name: CommitName | None = None
        self.error: Exception | None = None
        self._begun_s = time.perf_counter()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._watched: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._failure: CheckpointError | None = None
        self._cancel: Callable[[], None] = _nothing
        self.copies = DeviceCopies()
        self._closing: native.GateClosing | None = None
        self._staged = threading.Event()
        self._upload: Upload | None = None

    @property
    def waited_s(self) -> float:
        """How long sweeps have waited for memory that was not written yet, in seconds."""
        return self._closing.waited_s if self._closing is not None else 0.0

    @property
    def is_done(self) -> bool:
        """Whether it is committed or has failed."""
        return self._done.is_set()

    @property
    def is_durable(self) -> bool:
        """Whether it is committed; of a Checkpointer of a URL: in the store (on rank 0)."""
        is_here = self.is_done and self.error is None
        return is_here and (self._upload is None or self._upload.has_arrived)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the checkpoint is committed; of a Checkpointer of a URL: once it, or a newer
        one that took its place, is in the store (on rank 0).

        Raises the error it failed with, or TimeoutError after `timeout_s` seconds.
        """
        began_s = time.perf_counter()
        if not self._done.wait(timeout_s):
            raise TimeoutError(
                f"checkpoint of step {self.step}: not durable after {timeout_s:g} s; it goes on"
            )
        if self.error is not None:
            raise self.error
        if self._upload is not None:
            left_s = timeout_s
            if timeout_s is not None:
                left_s = max(0.0, timeout_s - (time.perf_counter() - began_s))
            self._upload.wait(left_s)

    def drop_unless_done(self, timeout_s: float, give_up: Callable[[str], None]) -> None:
        """Let it fail if it is not done within that time. `give_up` ends what else it waits for."""
        if not self._done.wait(timeout_s):
            text = f"checkpoint of step {self.step}: dropped, not done after {timeout_s:g} s"
            self.fail(CheckpointError(text))
            give_up(text)

    # --- what must not change -------------------------------------------------------------------

    def hold_stream(self) -> None:
        """What is queued on GPUs from now on begins after this save's copies from them."""
        self.copies.hold_stream()

    def check_edits(self) -> None:
        """To be called just before the owner of the memory writes it: what others have changed in
        place since `save()` fails this save. From then on changes are the owner's."""
        with self._lock:  # also while judging: the owner must not write before it is done
            watched, self._watched = self._watched, []
            self._judge(watched)

    def _judge(self, watched: Sequence[tuple[str, torch.Tensor, tuple[int, int]]]) -> None:
        edited = [name for name, tensor, mark in watched if self._mark(tensor) != mark]
        if edited and not self.is_done:
            more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
            self.fail(
                CheckpointError(
                    f"checkpoint of step {self.step}: {', '.join(edited[:3])}{more} changed in "
                    "place while being written; edit parameters under engine.edit_parameters(), or "
                    "call .wait() first"
                )
            )

    # --- for those who write ---------------------------------------------------------------------

    def holds(self, closing: native.GateClosing | None, copies: DeviceCopies) -> None:
        """What the save has taken hold of: memory behind a gate, and copies under way."""
        self._closing, self.copies = closing, copies

    def staged(self) -> None:
        """The last copy is made, or never will be."""
        self._staged.set()

    def wait_staged(self) -> None:
        self._staged.wait()

    def watch(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._watched = [(name, tensor, self._mark(tensor)) for name, tensor in tensors]

    def _mark(self, tensor: torch.Tensor) -> tuple[int, int]:
        """What an edit changes: the version, which `.data` does not count, and on request a sum."""
        if not self._is_paranoid:
            return tensor._version, 0
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return tensor._version, zlib.crc32(data.numpy().data)

    def check_untouched(self) -> None:
        """Raise what the save was failed with, also by an edit that nobody has told yet."""
        with self._lock:
            watched, self._watched = self._watched, []
            self._judge(watched)
        self.check_failed()

    def check_failed(self) -> None:
        """Raise what the save was failed with."""
        if self._failure is not None:
            raise self._failure

    def fail(self, failure: CheckpointError) -> None:
        """Give the save up; whatever was committed before stays."""
        if self._failure is None:
            self._failure = failure
        self._cancel()

    def cancel_by(self, cancel: Callable[[], None]) -> None:
        """How to stop the writing that has begun."""
        self._cancel = cancel
        if self._failure is not None:
            cancel()

    def returned(self) -> None:
        self.stall_s = time.perf_counter() - self._begun_s

    def commits(self, name: CommitName) -> None:
        """It is durable. `end()` says so to those who wait."""
        self.name = name
        self.durable_s = time.perf_counter() - self._begun_s

    def uploads(self, upload: Upload) -> None:
        """It is committed here, and on its way to the store."""
        self._upload = upload

    def failed(self, error: Exception) -> None:
        self.error = error
        self.end()

    def end(self) -> None:
        self._cancel = _nothing
        self._watched = []
        self._done.set()


def _nothing() -> None: ...
