"""What the crash tests drive: it saves what a step's number determines, and restores it.

`PlainSaver` puts a file of bytes into a LocalDirectory, which alone is tested then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tradewind._core import native
from tradewind.checkpoint.errors import CheckpointError, DamagedCheckpointError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import CommitName, shard_name

SHARD = shard_name(0, 1)
PAYLOAD_BYTES = 9000  # more than two pages, and not a multiple


def payload(step: int) -> bytes:
    """What is saved as `step`."""
    return random.Random(step).randbytes(PAYLOAD_BYTES)


class Saver(Protocol):
    """One process's hold of a directory of checkpoints."""

    def save(self, step: int) -> None:
        """Commit payload(step); returns when that is acknowledged, raises what prevented it."""

    def restore(self) -> tuple[int, bytes] | None:
        """The newest whole checkpoint. Raises a CheckpointError or OSError."""

    def restore_step(self, step: int) -> bytes:
        """A given one. Raises a CheckpointError or OSError."""

    def steps(self) -> list[int]:
        """Those that are committed, newest first."""

    def close(self) -> None:
        """End in good order. Not called where a process is supposed to die."""


MakeSaver = Callable[[Path, Any], Saver]


class PlainSaver:
    """Bytes in one file per commit."""

    def __init__(self, path: Path, env: Any, keep: int = 2, keep_every: int | None = None) -> None:
        self.directory = LocalDirectory(path, env, recycled_from_bytes=1)
        self._keep, self._keep_every = keep, keep_every

    def save(self, step: int) -> None:
        directory, data = self.directory, payload(step)
        name = directory.begin(step)
        try:
            is_spare = directory.take_spare(name, SHARD, len(data))
            path = directory.path_of(name, SHARD)
            directory.env.write_file(path, data, exclusive=not is_spare)
            directory.publish(name, seal(step, data))
        except BaseException:
            directory.abandon(name)
            directory.check_owner()
            raise
        directory.retain(self._keep, self._keep_every, None)

    def restore(self) -> tuple[int, bytes] | None:
        failures: dict[CommitName, str] = {}
        for _ in range(1000):
            names = [name for name in self.directory.committed() if name not in failures]
            if not names:
                break
            try:
                return names[0].step, self.read(names[0])
            except CheckpointError as error:
                failures[names[0]] = str(error)
        if failures:
            raise DamagedCheckpointError("; ".join(failures.values()))
        return None

    def restore_step(self, step: int) -> bytes:
        found = [name for name in self.directory.committed() if name.step == step]
        if not found:
            raise CheckpointError(f"no checkpoint of step {step}")
        return self.read(found[0])

    def read(self, name: CommitName) -> bytes:
        """The payload of a commit, verified."""
        manifest = _unseal(self.directory.read_manifest(name))
        with self.directory.reading(name, [SHARD]):
            data = bytes(self.directory.env.read_file(self.directory.path_of(name, SHARD), 1 << 20))
        if native.crc32c(data) != manifest["shard"] or manifest["step"] != name.step:
            raise DamagedCheckpointError(f"{name}: its bytes are not those that were written")
        return data

    def steps(self) -> list[int]:
        return [name.step for name in self.directory.committed()]

    def close(self) -> None:
        self.directory.close()


def seal(step: int, data: bytes) -> bytes:
    """The manifest of PlainSaver."""
    text = json.dumps({"step": step, "shard": native.crc32c(data)}).encode()
    return text + b"\n%08x" % native.crc32c(text)


def _unseal(data: bytes) -> dict[str, int]:
    text, _, seal = data.partition(b"\n")
    if seal != b"%08x" % native.crc32c(text):
        raise DamagedCheckpointError("the manifest is damaged")
    value: dict[str, int] = json.loads(text)
    return value
