"""The upload process: `python -m tradewind.checkpoint.stores.upload SOCKET`, one per trainer.

A process of its own because an uploader in Python would hold the trainer's lock. It has one end of
a socket pair, by which requests come with open descriptors of the files: shared locks that the
trainer took belong to these, so no file is recycled while it is read, and one that retention has
unlinked in the meantime is still there. It loads no torch, does one upload at a time, and ends with
the trainer, however that ended.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from tradewind.checkpoint.claims import Acceptance
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.stores.patience import Deadline, Patience, StoreError
from tradewind.checkpoint.stores.remote_commits import FencedStoreError, RemoteCommits
from tradewind.checkpoint.stores.store import FileContents, Store, open_store

MAX_MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 200  # in one message; the kernel takes 253
_MAX_TEXT = 4000
_LOOK_S = 1.0  # at whether the trainer is still there

Message = dict[str, Any]


def send(connection: socket.socket, message: Message, descriptors: list[int] | None = None) -> None:
    """One message, with open descriptors."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [data], descriptors or [])


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message; None once the other end is closed. Raises TimeoutError by the socket's."""
    data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
    return (json.loads(data), descriptors) if data else None


def main(argument: str) -> None:
    """Serve until the trainer is gone. Does not return."""
    # Ctrl-C and notices are the trainer's; it closes this process when it is done.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)
    connection = socket.socket(fileno=int(argument))
    connection.settimeout(_LOOK_S)
    parent = os.getppid()
    uploads: queue.SimpleQueue[tuple[Message, list[int]]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(connection, uploads), daemon=True).start()
    collected: list[int] = []
    while os.getppid() == parent:
        try:
            received = receive(connection)
        except TimeoutError:
            continue
        except OSError:
            break
        if received is None:
            break
        message, descriptors = received
        collected += descriptors
        if message["do"] != "more":
            uploads.put((message, collected))
            collected = []
    os._exit(0)


def _work(connection: socket.socket, uploads: queue.SimpleQueue[tuple[Message, list[int]]]) -> None:
    store: Store | None = None
    commits: RemoteCommits | None = None
    while True:
        message, descriptors = uploads.get()
        began = time.monotonic()
        answer: Message = {"id": message.get("id")}
        try:
            if message["do"] == "open":
                store = _open(message)
                # Loaded so far, for the test that it starts fast.
                answer["has_torch"] = "torch" in sys.modules
            elif message["do"] == "own":
                assert store is not None
                accepted = Acceptance(message["attempt"], frozenset(_json_of(descriptors[0])))
                commits = RemoteCommits(store, message["attempt"], accepted)
            elif message["do"] == "upload":
                assert commits is not None
                answer |= _upload(commits, message, descriptors)
            else:
                assert commits is not None
                answer |= _retain(commits, message)
        except Exception as error:
            answer |= _told(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        answer["duration_s"] = time.monotonic() - began
        with suppress(OSError):  # the trainer is gone; the other thread ends this process
            send(connection, answer)


def _open(message: Message) -> Store:
    told = message["patience"]
    patience = Patience(
        request=timedelta(seconds=told["request"]),
        silence=timedelta(seconds=told["silence"]),
        num_tries=told["num_tries"],
        first_pause=timedelta(seconds=told["first_pause"]),
        longest_pause=timedelta(seconds=told["longest_pause"]),
    )
    return open_store(
        message["url"],
        patience=patience,
        part_bytes=message["part_bytes"],
        num_threads=message["num_threads"],
        options=message["options"],
    )


def _upload(commits: RemoteCommits, message: Message, descriptors: list[int]) -> Message:
    """Data, then the manifest. The first two descriptors are what is told of the files, and the
    manifest."""
    told, manifest, *sources = descriptors
    files = [
        FileContents(**{**each, "block_crc32c": bytes.fromhex(each["block_crc32c"])})
        for each in _json_of(told)
    ]
    name = CommitName(message["attempt"], message["step"], message["commit_id"])
    deadline = Deadline(timedelta(seconds=message["deadline_s"]))
    pairs = list(zip(files, sources, strict=True))
    commits.upload(name, pairs, deadline, again=message["again"])
    commits.publish(name, _bytes_of(manifest))
    return {"bytes": sum(file.size_bytes for file in files)}


def _retain(commits: RemoteCommits, message: Message) -> Message:
    """What is done for a commit that is there, and not waited for."""
    name = CommitName(message["attempt"], message["step"], message["commit_id"])
    commits.tell_latest(name)
    return {"num_retired": len(commits.retain(message["keep"], message["keep_every"], name))}


def _told(error: Exception) -> Message:
    if isinstance(error, ImportError):
        kind = "import"
    elif isinstance(error, FencedStoreError):
        kind = "fenced"
    else:
        kind = "store"
    text = str(error) if isinstance(error, OSError | ImportError) else repr(error)
    return {
        "error": text[:_MAX_TEXT],
        "kind": kind,
        "transient": isinstance(error, StoreError) and error.transient,
    }


def _bytes_of(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _json_of(descriptor: int) -> Any:
    return json.loads(_bytes_of(descriptor))


def opening(
    url: str,
    patience: Patience,
    part_bytes: int,
    num_threads: int,
    options: Mapping[str, Any],
) -> Message:
    """The first message to the process."""
    return {
        "do": "open",
        "id": 0,
        "url": url,
        "patience": {
            "request": patience.request.total_seconds(),
            "silence": patience.silence.total_seconds(),
            "num_tries": patience.num_tries,
            "first_pause": patience.first_pause.total_seconds(),
            "longest_pause": patience.longest_pause.total_seconds(),
        },
        "part_bytes": part_bytes,
        "num_threads": num_threads,
        "options": dict(options),
    }


if __name__ == "__main__":
    main(sys.argv[1])
