"""Commits of small states, beside SQLite's of the same bytes and a bare write with fsync."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

import torch

import tradewind as tw
from measuring import Figure, interleave, summary

SIZES = {"4 KB": 4096, "10 MB": 10_000_000}
REPEATS = 30


def measure_small(folder: Path) -> dict[str, dict[str, Figure]]:
    """Seconds of a commit, by size and candidate."""
    return {name: _measure(size, folder) for name, size in SIZES.items()}


def _measure(size: int, folder: Path) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        state = {"state": torch.randint(0, 255, (size,), dtype=torch.uint8)}
        blob = state["state"].numpy().tobytes()
        database = sqlite3.connect(Path(own) / "database")
        database.execute("pragma synchronous=full")
        database.execute("create table states (step integer primary key, state blob)")
        plain = os.open(Path(own) / "plain", os.O_RDWR | os.O_CREAT)
        checkpointer = tw.Checkpointer(Path(own) / "ours", keep=3)
        steps = iter(range(10**9))

        def ours() -> None:
            checkpointer.save(state, step=next(steps)).wait(60)

        def sqlite() -> None:
            with database:
                database.execute("insert or replace into states values (1, ?)", (blob,))

        def write_and_sync() -> None:
            os.pwrite(plain, blob, 0)
            os.fsync(plain)

        candidates = {"tradewind": ours, "sqlite": sqlite, "write and fsync": write_and_sync}
        seconds = interleave(candidates, REPEATS, warmups=4)
        checkpointer.close()
        os.close(plain)
        database.close()
    return {name: summary(values) for name, values in seconds.items()}
