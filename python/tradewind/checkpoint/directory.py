"""What a place of commits is, local or remote: which commits count there, and how one is made.

A place holds one folder per save. A folder is a commit from the moment its manifest is there. An
owner claims an attempt number, the next one, before it saves; from then on no earlier owner can
commit there (claims.py says why). Readers claim nothing and disturb nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from tradewind.checkpoint.names import CommitName


class CheckpointDirectory(ABC):
    """Where checkpoints are committed. Thread-safe; one save at a time.

    Every method may raise OSError, or what the store's client raises for a place that cannot be
    reached; what a failed call leaves, `abandon`, `retain` or the next owner's `claim` clears.
    """

    where: str  # path or URL, for messages

    @abstractmethod
    def check(self) -> None:
        """Whether checkpoints may be read and written here; touches nothing.

        Raises NotACheckpointDirectoryError for a path that something else has taken, and
        NewerVersionError. A path that is not there yet is as good as an empty one."""

    @abstractmethod
    def committed(self) -> list[CommitName]:
        """The commits that count, the newest first. Empty where nothing is there."""

    @abstractmethod
    def read_manifest(self, name: CommitName) -> bytes:
        """Raises VanishedCheckpointError where the commit is not there (any more)."""

    @abstractmethod
    def claim(self) -> int:
        """Become the owner; returns the attempt's number. Asked again, returns the same number.

        Raises DirectoryInUseError where a live owner can be seen."""

    @abstractmethod
    def begin(self, step: int) -> CommitName:
        """A folder for a save of this owner, which claims first where it has not yet.

        Raises FencedError where a later attempt owns the place."""

    @abstractmethod
    def publish(self, name: CommitName, manifest: bytes) -> None:
        """Commit `name`, all files of which are written and synced. Durable as it returns.

        Raises FencedError where a later attempt owns the place; the save then counts as failed,
        even where the later owner should have seen and accepted it."""

    @abstractmethod
    def abandon(self, name: CommitName) -> None:
        """Take away what a failed save left. Does not raise for what cannot be taken away."""

    def check_owner(self) -> None:
        """Why a save failed, perhaps: raises FencedError where a later attempt owns the place and
        took the save's folder away."""
        return None

    @abstractmethod
    def retain(
        self, keep: int, keep_every: int | None, verified: CommitName | None
    ) -> list[CommitName]:
        """Retire the commits that `to_keep` does not name; returns those retired."""

    @abstractmethod
    def take_spare(self, name: CommitName, file_name: str, size_bytes: int) -> bool:
        """Put a file that retention freed at `file_name` of `name`, to be overwritten; False:
        there is none, make a new one. Never for a file of another size class."""

    @abstractmethod
    def close(self) -> None:
        """Give the place back. Does nothing in a forked child or when called again."""

    def reading(
        self, name: CommitName, file_names: Iterable[str]
    ) -> AbstractContextManager[object]:
        """While it is entered, these files of `name` are not overwritten by any owner.

        Raises VanishedCheckpointError, on entering or for a file that is not found inside, where
        the commit is not there (any more)."""
        return nullcontext()


def to_keep(
    committed: Sequence[CommitName],
    keep: int,
    keep_every: int | None = None,
    verified: CommitName | None = None,
) -> frozenset[CommitName]:
    """Which of `committed` (any order) stay: the `keep` newest, of each step that is a multiple of
    `keep_every` the newest, and `verified`, the newest that is known to be whole.

    Raises ValueError for a `keep` or `keep_every` below 1.
    """
    if keep < 1:
        raise ValueError(f"checkpoint: keep: expected at least 1, got {keep}")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"checkpoint: keep_every: expected at least 1, got {keep_every}")
    newest_first = sorted(committed, reverse=True)
    kept = set(newest_first[:keep])
    if keep_every is not None:
        milestones: dict[int, CommitName] = {}
        for name in newest_first:
            if name.step % keep_every == 0:
                milestones.setdefault(name.step, name)
        kept.update(milestones.values())
    if verified is not None:
        kept.update(name for name in newest_first if name == verified)
    return frozenset(kept)
