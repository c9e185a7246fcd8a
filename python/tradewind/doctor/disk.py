"""Finding about the disk of a directory: room, kind, and how fast it makes bytes durable."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tradewind import machine
from tradewind.doctor.findings import Finding
from tradewind.track.atomic import write_all

DEADLINE = timedelta(seconds=15)
_WRITE_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
_WRITE_TIME_S = 5.0
_ROOM_TO_WRITE_BYTES = 512 << 20
_LOW_FREE_BYTES = 5 << 30
_SLOW_BYTES_PER_S = 50e6


@dataclass(frozen=True)
class DiskFacts:
    """What was measured; `bytes_per_s` is None where nothing was written, for the reason `note`."""

    filesystem: str
    free_bytes: int
    bytes_per_s: float | None
    note: str = ""


def disk_finding(folder: Path | None = None, deadline: timedelta = DEADLINE) -> Finding:
    """Look at the disk of `folder` (default: the working directory); writes and removes 64 MiB.

    Takes `deadline` at most: a network disk whose server is gone never answers, so it is asked
    from a thread that may be left behind.
    """
    answer: list[DiskFacts | OSError] = []

    def ask() -> None:
        try:
            answer.append(measure(Path.cwd() if folder is None else folder))
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="tradewind-disk", daemon=True)
    thread.start()
    thread.join(deadline.total_seconds())
    told = answer[0] if answer else OSError(f"no answer within {deadline.total_seconds():g} s")
    if isinstance(told, OSError):
        return Finding(
            "disk",
            "warning",
            f"the directory does not answer: {told}",
            "runs and checkpoints cannot be written here",
            "change to a directory on a disk that works",
        )
    return finding_of(told)


def measure(folder: Path) -> DiskFacts:
    """Room, kind and write rate. Raises OSError where the directory does not answer."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    kind = machine.filesystem_type(folder)
    if free < _ROOM_TO_WRITE_BYTES:
        return DiskFacts(kind, free, None, "too full to try")
    try:
        return DiskFacts(kind, free, _write_rate(folder))
    except OSError as error:
        return DiskFacts(kind, free, None, f"not writable: {error.strerror}")


def finding_of(facts: DiskFacts) -> Finding:
    """The finding for what was measured."""
    free = f"{facts.free_bytes / 2**30:.1f} GiB free"
    rate = facts.note if facts.bytes_per_s is None else f"{facts.bytes_per_s / 1e6:.0f} MB/s synced"
    found = f"{facts.filesystem or 'unknown file system'}, {free}, {rate}"
    told: dict[str, object] = {
        "filesystem": facts.filesystem,
        "free_bytes": facts.free_bytes,
        "write_bytes_per_s": facts.bytes_per_s,
        "is_network": machine.is_network_filesystem(facts.filesystem),
    }
    cost = remedy = None
    if facts.free_bytes < _LOW_FREE_BYTES:
        cost = "a run soon fills it: metrics then wait in memory and checkpoints fail"
        remedy = "make room, or send runs elsewhere with TRADEWIND_RUN"
    elif facts.bytes_per_s is None:
        cost = "runs and checkpoints cannot be written here"
        remedy = "change to a writable directory, or set TRADEWIND_RUN"
    elif facts.bytes_per_s < _SLOW_BYTES_PER_S:
        cost = f"a checkpoint of 1 GB takes {1e9 / facts.bytes_per_s:.0f} s to be durable"
        remedy = "send runs to a local disk with TRADEWIND_RUN"
    return Finding("disk", "warning" if cost else "ok", found, cost, remedy, told)


def _write_rate(folder: Path) -> float:
    """Bytes per second of writes that are synced piece by piece, over 64 MiB or five seconds."""
    piece = os.urandom(_PIECE_BYTES)  # not compressible, so that the disk really takes it
    written = 0
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        while written < _WRITE_BYTES and time.perf_counter() - began < _WRITE_TIME_S:
            write_all(file.fileno(), piece)
            os.fsync(file.fileno())
            written += len(piece)
        return written / (time.perf_counter() - began)
