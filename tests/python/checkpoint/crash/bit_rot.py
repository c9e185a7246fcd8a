"""Bytes of a checkpoint that changed on the disk, one after the other."""

from __future__ import annotations

from pathlib import Path

from checkpoint.crash.crash_states import Record, Violation
from checkpoint.crash.savers import MakeSaver, payload

from tradewind._core import native
from tradewind.checkpoint.errors import CheckpointError

_STRIDE_BYTES = 97


def check_bit_rot(record: Record, make: MakeSaver) -> int:
    """Flip one bit of every 97th byte of every file of the newest commit, restore, and put it back.

    Returns the number of flips; raises Violation where other bytes than were saved are restored."""
    newest = record.acknowledged[-1][1]
    files = [
        path
        for folder in sorted(record.path.glob(f"step-{newest:012d}.*"))
        for path in sorted(folder.iterdir())
    ]
    assert files
    return sum(_flip_each(record, make, path) for path in files)


def _flip_each(record: Record, make: MakeSaver, path: Path) -> int:
    steps = {step for _, step in record.acknowledged}
    whole = path.read_bytes()
    for position in range(0, len(whole), _STRIDE_BYTES):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        try:
            restored = make(record.path, native.posix_env()).restore()
        except (CheckpointError, OSError):
            continue
        if restored is None or restored[0] not in steps or restored[1] != payload(restored[0]):
            raise Violation(f"{path.name}, byte {position} flipped: restored other bytes")
    path.write_bytes(whole)
    return -(-len(whole) // _STRIDE_BYTES)
