"""Which commit is restored: the newest one that is whole, the same on every rank. Damaged ones are
passed over, each with a line that says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from tradewind.checkpoint import manifest as manifests
from tradewind.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NewerVersionError,
    StateMismatchError,
)
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.names import CommitName
from tradewind.checkpoint.peer_memory import PeerMemory
from tradewind.checkpoint.ranks import Ranks
from tradewind.checkpoint.restoring import CommitReader

Passed = Callable[[CommitName, str], None]


class Behind(Protocol):
    """A place behind the directory that has commits, too: asked by rank 0."""

    def bring(self, step: int | None = None) -> None:
        """Have its newest commit (of `step`) in the directory."""

    def repair(self, name: CommitName, why: str) -> bool:
        """Have a whole copy in the directory of a commit that was refused. Whether there is one."""


_MAX_TRIES = 10_000


@dataclass(frozen=True)
class Found:
    """The commit that was taken, and what taking it gave."""

    name: CommitName
    reader: CommitReader
    value: Any


class Search:
    """Looks through the commits of `directory` with all ranks. `passed(name, why)` is told of each
    that is not taken. `behind`, on rank 0, and whether there is one, on all ranks."""

    def __init__(
        self,
        directory: LocalDirectory,
        ranks: Ranks,
        open_commit: Any,
        passed: Passed,
        behind: Behind | None = None,
        *,
        has_behind: bool = False,
    ) -> None:
        self._directory = directory
        self._ranks = ranks
        self._open = open_commit
        self._passed = passed
        self._behind, self._has_behind = behind, has_behind
        self._num_done = 0

    def run(self, take: Callable[[CommitReader], Any], step: int | None = None) -> Found | None:
        """Let every rank `take` the newest commit, or the newest of `step`, that all can take.

        Returns None where there is no commit. Raises DamagedCheckpointError where there are some
        and none is whole, CheckpointError for a step that is not there, and StateMismatchError or
        NewerVersionError at the first that is whole but cannot be taken.
        """
        topic = f"search/{self._num_done}"
        self._num_done += 1
        refused: list[str] = []
        tried: set[CommitName] = set()
        # Looked up anew after each that was refused: an owner that saves meanwhile may have retired
        # it for a newer one, and the next older may be a milestone of long ago.
        for number in range(_MAX_TRIES):
            listed = self._candidates(f"{topic}/{number}", step, number == 0)
            name = next((each for each in listed if each not in tried), None)
            if name is None:
                break
            found = self._try(f"{topic}/{number}", name, take)
            if not isinstance(found, Found) and self._is_repaired(f"{topic}/{number}", name, found):
                found = self._try(f"{topic}/{number}/again", name, take)
            if isinstance(found, Found):
                return found
            tried.add(name)
            refused.append(f"{name.folder}: {found}")
            self._passed(name, found)
        if refused:
            raise DamagedCheckpointError(
                f"{self._directory.where}: none of its {len(refused)} checkpoints is whole: "
                f"{'; '.join(refused)}. What was to be filled may hold parts of them; make it anew"
            )
        return None

    def _candidates(self, topic: str, step: int | None, is_first_look: bool) -> list[CommitName]:
        def look() -> list[list[Any]] | None:
            if not self._ranks.is_first:
                return None
            self._directory.check()
            if self._behind is not None and is_first_look:
                self._behind.bring(step)
            return [[n.attempt, n.step, n.id] for n in self._directory.committed()]

        told = self._ranks.together(f"{topic}/candidates", look)[0]
        names = [CommitName(*each) for each in told]
        if step is None:
            return names
        of_step = [name for name in names if name.step == step]
        if not of_step and is_first_look:
            there = sorted({name.step for name in names})
            raise CheckpointError(
                f"{self._directory.where}: has no checkpoint of step {step}; "
                + (f"there are {', '.join(map(str, there))}" if there else "there is none")
            )
        return of_step

    def _is_repaired(self, topic: str, name: CommitName, why: str) -> bool:
        if not self._has_behind:
            return False
        told = self._ranks.together(
            f"{topic}/repair", lambda: self._behind is not None and self._behind.repair(name, why)
        )
        return bool(told[0])

    def _try(
        self, topic: str, name: CommitName, take: Callable[[CommitReader], Any]
    ) -> Found | str:
        """The commit taken by all ranks, or why it cannot be."""
        error: Exception | None = None
        value: Any = None
        reader: CommitReader | None = None
        try:
            with ExitStack() as stack:
                reader = self._open(name, stack)
                value = take(reader)
        except (CheckpointError, OSError) as caught:
            error = caught
        final = isinstance(error, (StateMismatchError, NewerVersionError))
        said = "" if error is None else f"{type(error).__name__}: {error}"
        told = self._ranks.gather(topic, [said, final])
        failed = [(rank, text, end) for rank, (text, end) in enumerate(told) if text]
        if not failed:
            assert reader is not None
            return Found(name, reader, value)
        if error is not None and final:
            raise error
        text = "; ".join(self._who(rank, text) for rank, text, _ in failed)
        if any(end for _, _, end in failed):
            raise StateMismatchError(text)
        return str(error) if error is not None and self._ranks.size == 1 else text

    def _who(self, rank: int, text: str) -> str:
        return text if self._ranks.size == 1 else f"rank {rank}: {text}"


def open_commit(
    directory: LocalDirectory, env: Any, num_threads: int, peers: PeerMemory | None = None
) -> Callable[[CommitName, ExitStack], CommitReader]:
    """Opens commits of a directory; while the stack lives, no owner overwrites their files. What
    `peers` have in memory is read from there."""

    def open_one(name: CommitName, stack: ExitStack) -> CommitReader:
        where = f"{directory.where}/{name.folder}"
        manifest = manifests.decode(directory.read_manifest(name), where)
        if (manifest.step, manifest.attempt, manifest.id) != (name.step, name.attempt, name.id):
            raise DamagedCheckpointError(
                f"{where}: its manifest is that of step {manifest.step}, attempt "
                f"{manifest.attempt}, {manifest.id}"
            )
        files = [file.name for file in manifest.files]
        in_memory = stack.enter_context(peers.fetched(name, files)) if peers is not None else {}
        on_disk = [file for file in files if file not in in_memory]
        stack.enter_context(directory.reading(name, on_disk))
        folder = directory.path_of(name)
        return CommitReader(env, folder, manifest, in_memory=in_memory, num_threads=num_threads)

    return open_one


def names_of(steps: Sequence[CommitName]) -> list[int]:
    """Their steps, ascending, each once."""
    return sorted({name.step for name in steps})
