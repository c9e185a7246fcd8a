"""Every state that a power cut may leave of a recorded run, each opened and judged.

The promise: the restore gives exactly a step that was committed, not older than the last one that
was acknowledged, bit for bit; and who comes next can save. What a step holds, `payload(step)` says.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.crash.power_cut import Disk, Found, cuts, lay_out
from checkpoint.crash.savers import MakeSaver, Saver, payload

from tradewind._core import native
from tradewind.checkpoint import names
from tradewind.checkpoint.errors import CheckpointError

EXHAUSTIVE = os.environ.get("TRADEWIND_EXHAUSTIVE", "") not in ("", "0")
NEXT_STEP = 900


class Violation(AssertionError):
    """A state of the disk for which the promise does not hold."""


@dataclass
class Record:
    """What a run did: saves begun, saves acknowledged, by the number of operations before."""

    env: native.RecordingEnv
    root: Path  # the parent of the directory of checkpoints
    begun: list[tuple[int, int]] = field(default_factory=list)  # (operations so far, step)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.root / "checkpoints"

    def save(self, saver: Saver, step: int) -> None:
        """Save, and note the operation from which on `step` may be, and must be, restored."""
        self.begun.append((len(self.env.operations()), step))
        saver.save(step)
        self.acknowledged.append((len(self.env.operations()), step))


@dataclass
class Tally:
    """How much was tried."""

    points: int = 0
    cuts: int = 0
    states: int = 0

    def __str__(self) -> str:
        return f"{self.points} points, {self.cuts} cuts, {self.states} different disks"


@contextmanager
def fast_folder(fallback: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of small disks are made in it."""
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else fallback
    folder = Path(tempfile.mkdtemp(prefix="tradewind-crash-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_power_cuts(record: Record, make: MakeSaver, folder: Path, every: int = 1) -> Tally:
    """Cut the power after each (or each `every`-th) operation in every way of `cuts`.

    Raises Violation with the operations around the point."""
    tally = Tally()
    seen: set[bytes] = set()
    disk = Disk(str(record.root))
    operations = record.env.operations()
    for number in range(len(operations) + 1):
        if number > 0:
            disk.apply(operations[number - 1])
        if number % every and number != len(operations):
            continue
        tally.points += 1
        steps = [step for at, step in record.begun if at <= number]
        last = [step for at, step in record.acknowledged if at <= number]
        allowed = steps[steps.index(last[-1]) if last else 0 :]
        for cut in cuts(disk, seed=number, exhaustive=EXHAUSTIVE):
            tally.cuts += 1
            found = disk.after(cut)
            key = _digest(found, allowed, bool(last))
            if key in seen:
                continue
            seen.add(key)
            tally.states += 1
            try:
                _judge(found, folder / str(len(seen)), make, allowed, must_restore=bool(last))
            except Violation as violation:
                near = operations[max(0, number - 4) : number + 1]
                lines = [f"{each['kind']} {each['path']} {each['to']}" for each in near]
                raise Violation(
                    f"after operation {number}: {violation}\n" + "\n".join(lines)
                ) from (violation.__cause__ or violation)
    return tally


def _digest(found: Found, allowed: list[int], must_restore: bool) -> bytes:
    digest = hashlib.blake2b(
        repr((allowed, must_restore, sorted(map(sorted, found.shared)))).encode()
    )
    for path in sorted(found.tree):
        content = found.tree[path]
        digest.update(path.encode() + (b"/" if content is None else b"=" + content) + b"\0")
    return digest.digest()


def _judge(
    found: Found, root: Path, make: MakeSaver, allowed: list[int], must_restore: bool
) -> None:
    """Restore from the disk `found`, then go on with it."""
    _check_shared(found)
    lay_out(found.tree, root)
    path = root / "checkpoints"
    names._sequence = itertools.count()  # as in the process that comes next
    try:
        with closing(make(path, native.posix_env())) as reader:
            _check_restore(reader, allowed, must_restore)
        saver = make(path, native.posix_env())
        before = saver.restore()
        saver.save(NEXT_STEP)
        after = saver.restore()
        saver.close()
    except (CheckpointError, OSError) as error:
        raise Violation(f"{type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(root)
    if after != (NEXT_STEP, payload(NEXT_STEP)):
        raise Violation(f"the next save was acknowledged, and {_said(after)} restored ({before})")


def _check_restore(saver: Saver, allowed: list[int], must_restore: bool) -> None:
    restored = saver.restore()
    if restored is None:
        if must_restore:
            raise Violation(f"nothing restored, expected one of {allowed}")
        return
    step, data = restored
    if step not in allowed:
        raise Violation(f"step {step} restored, expected one of {allowed}")
    if data != payload(step):
        raise Violation(f"step {step} restored with other bytes than were saved")
    for other in saver.steps():
        try:
            if saver.restore_step(other) != payload(other):
                raise Violation(f"step {other} restored with other bytes than were saved")
        except (CheckpointError, OSError):
            continue  # an old one that was being retired: by name


def _check_shared(found: Found) -> None:
    """No file of a commit may be one that will be overwritten."""
    for paths in found.shared:
        spare = [path for path in paths if "/spare/" in path]
        others = [path for path in paths if path not in spare]
        for path in others:
            if spare and path.rpartition("/")[0] + "/manifest.json" in found.tree:
                raise Violation(f"{path} of a commit is also {spare[0]}, which will be overwritten")


def _said(restored: tuple[int, bytes] | None) -> str:
    return "nothing" if restored is None else f"step {restored[0]}"
