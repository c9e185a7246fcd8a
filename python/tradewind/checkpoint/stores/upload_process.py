"""The process that `upload.py` describes, as the trainer holds it: started, spoken to, ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tradewind.checkpoint.stores.upload import MAX_DESCRIPTORS, Message, receive, send

# As `python -m tradewind.checkpoint.stores.upload`, with the trainer's own search path.
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tradewind.checkpoint.stores.upload import main
main(sys.argv[1])
"""
_OPEN_S = 60.0  # a machine at its limits still starts a Python
_END_S = 10.0


class ProcessEnded(Exception):
    """The process is gone: killed, out of memory."""


class UploadProcess:
    """Starts at once, comes up meanwhile. One thread speaks to it; any may end it."""

    def __init__(self, opening: Message) -> None:
        self._opening = opening
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False
        self._is_ended = False
        self._last_id = 0
        self._start()

    @property
    def process_id(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def begin(self, introduce: Callable[[], None]) -> None:
        """Have a process that is up; `introduce` it where it has just started.

        Raises what its `open` failed with (ImportError, StoreError), or ProcessEnded."""
        if self._process is None:
            self._start()
        if self._is_ready:
            return
        try:
            answer = self._answer(0, _OPEN_S)
        except TimeoutError:
            self._drop()
            raise ProcessEnded(f"the upload process did not come up within {_OPEN_S:g} s") from None
        if "error" in answer:
            self._drop()
            raise (ImportError if answer["kind"] == "import" else OSError)(answer["error"])
        introduce()
        self._is_ready = True

    def exchange(
        self, message: Message, descriptors: Sequence[int], timeout_s: float
    ) -> dict[str, Any]:
        """Its answer. Raises TimeoutError, or ProcessEnded."""
        connection = self._connection
        if connection is None:
            raise ProcessEnded("the upload process was ended")
        self._last_id += 1
        number = self._last_id
        left = list(descriptors)
        try:
            connection.settimeout(timeout_s)
            while len(left) > MAX_DESCRIPTORS:
                send(connection, {"do": "more"}, left[:MAX_DESCRIPTORS])
                del left[:MAX_DESCRIPTORS]
            send(connection, {**message, "id": number}, left)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._ended() from error
        return self._answer(number, timeout_s)

    def _answer(self, number: int, timeout_s: float) -> dict[str, Any]:
        connection = self._connection
        if connection is None:
            raise ProcessEnded("the upload process was ended")
        try:
            connection.settimeout(timeout_s)
            received = receive(connection)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._ended() from error
        if received is None:
            raise self._ended()
        answer = received[0]
        assert answer["id"] == number, f"answer {answer['id']} to question {number}"
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock, theirs:
            if self._is_ended:
                ours.close()
                raise ProcessEnded("the uploader was closed")
            try:
                number = str(theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, number, json.dumps(sys.path)],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
            self._connection = ours
            self._is_ready = False
        with suppress(OSError):  # it died at once: found by who waits for the answer
            send(ours, self._opening)

    def _ended(self) -> ProcessEnded:
        process = self._process
        code = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_END_S)
        self._drop()
        how = f"with signal {-code}" if code is not None and code < 0 else f"with code {code}"
        return ProcessEnded(f"the upload process ended {how}")

    def _drop(self) -> None:
        """End the process; the next `begin` starts another."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
            self._is_ready = False
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        if connection is not None:
            # Wakes a thread that waits for an answer, which close() alone would not.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def end(self, *, for_good: bool = True) -> None:
        """Kill it: what it was doing has no effect that a next try would not repeat."""
        self._is_ended = self._is_ended or for_good
        self._drop()

    def forget(self) -> None:
        """In a forked child: let go of the parent's end, which must be the only one."""
        connection, self._connection, self._process = self._connection, None, None
        if connection is not None:
            with suppress(OSError):
                os.close(connection.detach())
