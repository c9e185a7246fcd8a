"""A predecessor that still lives and its successor, interleaved at every pair of their calls.

Promised: a commit of the predecessor's that the successor did not accept is never restored, and is
not acknowledged; what was acknowledged is accepted; and the successor can save."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint.crash.crash_states import EXHAUSTIVE, fast_folder
from checkpoint.crash.savers import PlainSaver, payload
from checkpoint.crash.stepped import Stepped, SteppedEnv

from tradewind._core import native
from tradewind.checkpoint.attempts import Attempts
from tradewind.checkpoint.claims import Acceptance
from tradewind.checkpoint.errors import FencedError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import CommitName

PREDECESSOR, SUCCESSOR = 30, 100


class Violation(AssertionError):
    """An order in which a promise does not hold."""


def _set_up(path: Path, keep: int) -> PlainSaver:
    """A directory with commits of steps 10 and 20, and their owner, about to save 30."""
    saver = PlainSaver(path, native.posix_env(), keep=keep)
    saver.save(10)
    saver.save(20)
    return saver


def _go_on(saver: PlainSaver, env: SteppedEnv) -> str:
    _use(saver, env)
    saver.save(PREDECESSOR)
    return "acknowledged"


def _use(saver: PlainSaver, env: Any) -> None:
    directory = saver.directory
    directory.env = env
    for part in (directory._attempts, directory._folders, directory._spares):
        part._env = env


def _follow(path: Path, env: SteppedEnv, keep: int) -> tuple[int, int]:
    """What a new process does: own, restore, go on. Returns the steps restored and saved."""
    saver = PlainSaver(path, env, keep=keep)
    saver.directory.claim()
    restored = saver.restore()
    assert restored is not None and restored[1] == payload(restored[0])
    saver.save(SUCCESSOR)
    return restored[0], SUCCESSOR


def _run(path: Path, keep: int, first: int, second: int) -> tuple[Stepped, Stepped]:
    """`first` calls of the predecessor, `second` of the successor, then the rest of the one, then
    of the other."""
    old = _set_up(path, keep)
    predecessor = Stepped(native.posix_env(), lambda env: _go_on(old, env))
    predecessor.step(first)
    successor = Stepped(native.posix_env(), lambda env: _follow(path, env, keep))
    successor.step(second)
    seen = _readable(path)
    predecessor.finish()
    _check_reader(path, seen, predecessor)
    successor.finish()
    old.directory._owner.release()
    return predecessor, successor


def _accepted(path: Path) -> set[int] | None:
    """Steps in the successor's list; None: there is none yet."""
    file = path / "attempts" / "000000002.accepted"
    if not file.exists():
        return None
    text = file.read_text()
    return {step for step in (10, 20, PREDECESSOR) if f"step-{step:012d}" in text}


def _readable(path: Path) -> tuple[set[int] | None, list[int]]:
    return _accepted(path), PlainSaver(path, native.posix_env()).steps()


def _check_reader(
    path: Path, before: tuple[set[int] | None, list[int]], predecessor: Stepped
) -> None:
    for accepted, steps in (before, _readable(path)):
        if accepted is not None and PREDECESSOR in steps and PREDECESSOR not in accepted:
            raise Violation("readers see a commit that the successor did not accept")
    accepted = _accepted(path)
    is_acknowledged = predecessor.ends_with == "acknowledged"
    if is_acknowledged and accepted is not None and PREDECESSOR not in accepted:
        raise Violation("an acknowledged commit was not accepted")


def _check_end(path: Path, predecessor: Stepped, successor: Stepped) -> None:
    if isinstance(successor.ends_with, Exception):
        raise Violation("the successor failed") from successor.ends_with
    restored, saved = successor.ends_with
    end = predecessor.ends_with
    if end == "acknowledged" and restored != PREDECESSOR:
        raise Violation(f"step {PREDECESSOR} was acknowledged, the successor restored {restored}")
    if end != "acknowledged" and not isinstance(end, FencedError):
        raise Violation("the predecessor was not told that it is followed") from end
    final = PlainSaver(path, native.posix_env()).restore()
    if final != (saved, payload(saved)):
        raise Violation(f"the successor's save was acknowledged, {final and final[0]} restored")


def _lengths(folder: Path, keep: int) -> tuple[int, int]:
    predecessor, successor = _run(folder / "length", keep, 10**6, 0)
    num_first = predecessor.num_calls
    shutil.rmtree(folder / "length")
    predecessor, successor = _run(folder / "length", keep, 0, 10**6)
    shutil.rmtree(folder / "length")
    return num_first, successor.num_calls


def _run_all(folder: Path, keep: int, stride: int) -> tuple[int, dict[str, int]]:
    """How many orders were tried, and how the predecessor ended. Raises Violation."""
    ends: dict[str, int] = {}
    num_first, num_second = _lengths(folder, keep)
    assert num_first > 20 and num_second > 40
    pairs = list(itertools.product(range(num_first + 1), range(num_second + 1)))[::stride]
    for first, second in pairs:
        path = folder / "checkpoints"
        try:
            predecessor, successor = _run(path, keep, first, second)
            _check_end(path, predecessor, successor)
        except Violation as violation:
            raise Violation(f"order {first}, {second}: {violation}") from violation.__cause__
        end = predecessor.ends_with
        name = end if isinstance(end, str) else type(end).__name__
        ends[name] = ends.get(name, 0) + 1
        shutil.rmtree(path)
    return len(pairs), ends


@pytest.mark.parametrize("keep", [1, 2])
def test_every_order(keep: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fast_folder(tmp_path) as folder:
        num_tried, ends = _run_all(folder, keep, stride=1 if EXHAUSTIVE else 2)
    assert ends["acknowledged"] > 0 and ends[FencedError.__name__] > 0
    with capsys.disabled():
        print(f"\n  orders of two owners, keep={keep}: {num_tried}, predecessor: {ends}")


# --- what is planted must be found --------------------------------------------------------------


def _no_look_after_the_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    publish, check = LocalDirectory._publish, Attempts.check

    def mutant(directory: LocalDirectory, name: CommitName, manifest: bytes, attempt: int) -> None:
        looks = itertools.count()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                directory._attempts,
                "check",
                lambda attempt: next(looks) > 0 or check(directory._attempts, attempt),
            )
            publish(directory, name, manifest, attempt)

    monkeypatch.setattr(LocalDirectory, "_publish", mutant)


def _every_commit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acceptance, "counts", lambda self, name: True)


def _lists_before_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    claim_next = LocalDirectory._claim_next

    def mutant(directory: LocalDirectory) -> int:
        seen = directory.committed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(directory, "committed", lambda: seen)
            return claim_next(directory)

    monkeypatch.setattr(LocalDirectory, "_claim_next", mutant)


def _never_looks_at_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempts, "check", lambda self, attempt: True)


@pytest.mark.parametrize(
    "plant",
    [
        _no_look_after_the_rename,
        _every_commit_counts,
        _lists_before_it_claims,
        _never_looks_at_claims,
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with fast_folder(tmp_path) as folder, pytest.raises(Violation):
        _run_all(folder, keep=2, stride=1)
