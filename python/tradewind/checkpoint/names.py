"""What stands in a directory of checkpoints, by name: commit folders, claims, shards."""

from __future__ import annotations

import itertools
import re
import secrets
from dataclasses import dataclass
from functools import total_ordering

MARKER = "tradewind-checkpoints.json"  # marks a directory as ours
LATEST = "latest"  # name of the newest committed folder, for people
ATTEMPTS = "attempts"  # folder of claims
SPARE = "spare"  # folder of shard files to be used again
LOCK = ".lock"
MANIFEST = "manifest.json"  # in a commit's folder: its presence is the commit
SHARD_SUFFIX = ".safetensors"

MAX_STEP = 10**12 - 1
MAX_ATTEMPT = 10**9 - 1
MAX_WORLD_SIZE = 99_999

_RANDOM_BYTES = 4
_ID = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(r"step-([0-9]{12})\.([0-9]{9})\.([0-9a-f]{16})")
_CLAIM = re.compile(r"([0-9]{9})")
_ACCEPTED = re.compile(r"([0-9]{9})\.accepted")
_SHARD = re.compile(r"shard-([0-9]{5})-of-([0-9]{5})(?:\.[0-9]{5})?\.safetensors")


_sequence = itertools.count()


@total_ordering
@dataclass(frozen=True)
class CommitName:
    """One save: the attempt that made it, its step and what tells it from any other. Ordered as
    saves began: a later attempt goes on from what it accepted of earlier ones, and within an
    attempt, which is one process, the id counts. (Steps do not: training may have gone back.)

    Raises ValueError for an attempt, a step or an id that no folder's name can hold.
    """

    attempt: int
    step: int
    id: str

    def __post_init__(self) -> None:
        _check_count("attempt", self.attempt, MAX_ATTEMPT)
        _check_count("step", self.step, MAX_STEP)
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ValueError(f"checkpoint: id: expected 16 digits of 0-9a-f, got {self.id!r}")

    @classmethod
    def new(cls, attempt: int, step: int) -> CommitName:
        """A name that nothing had before, ordered behind all that this process made: the id is
        eight digits that count and eight random ones."""
        count = next(_sequence) % 16**8
        return cls(attempt, step, f"{count:08x}{secrets.token_hex(_RANDOM_BYTES)}")

    @classmethod
    def parse(cls, folder: str) -> CommitName | None:
        """The commit that `folder` (a bare name) is called after; None for any other name."""
        found = _FOLDER.fullmatch(folder)
        return cls(int(found[2]), int(found[1]), found[3]) if found else None

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, CommitName):
            return NotImplemented
        return (self.attempt, self.id, self.step) < (other.attempt, other.id, other.step)

    @property
    def folder(self) -> str:
        return f"step-{self.step:012d}.{self.attempt:09d}.{self.id}"

    def __str__(self) -> str:
        return self.folder


def claim_file(attempt: int) -> str:
    """The file in ATTEMPTS by which `attempt` was claimed."""
    _check_count("attempt", attempt, MAX_ATTEMPT)
    return f"{attempt:09d}"


def parse_claim(file_name: str) -> int | None:
    """The attempt that `file_name` claims; None for any other file."""
    found = _CLAIM.fullmatch(file_name)
    return int(found[1]) if found else None


def accepted_file(attempt: int) -> str:
    """The file in ATTEMPTS that lists which commits of earlier attempts `attempt` goes on from."""
    return claim_file(attempt) + ".accepted"


def parse_accepted(file_name: str) -> int | None:
    """The attempt whose list `file_name` is; None for any other file."""
    found = _ACCEPTED.fullmatch(file_name)
    return int(found[1]) if found else None


def shard_name(rank: int, world_size: int, part: int = 0) -> str:
    """The file that `rank` of `world_size` writes; of a shard in several parts, the `part`-th."""
    _check_count("world size", world_size, MAX_WORLD_SIZE)
    if not 0 <= rank < world_size:
        raise ValueError(f"checkpoint: rank: expected 0 to {world_size - 1}, got {rank}")
    which = f".{part:05d}" if part else ""
    return f"shard-{rank:05d}-of-{world_size:05d}{which}{SHARD_SUFFIX}"


def parse_shard(file_name: str) -> tuple[int, int] | None:
    """(rank, world size) of a shard's file; None for any other file."""
    found = _SHARD.fullmatch(file_name)
    if found is None or not int(found[1]) < int(found[2]):
        return None
    return int(found[1]), int(found[2])


def _check_count(what: str, value: int, largest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"checkpoint: {what}: expected an integer, got {type(value).__name__}")
    if not 0 <= value <= largest:
        raise ValueError(f"checkpoint: {what}: expected 0 to {largest}, got {value}")
