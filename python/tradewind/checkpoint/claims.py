"""Which commits count when owners follow, and may overlap, one another: pure, for every place.

An owner claims the next attempt number, then lists the commits that count, then writes that list
down. Readers let the newest list decide. So an earlier owner that still lives, on another machine
perhaps, either published before the list was made, and is in it, or its commit is ignored for ever;
and because the claim stands before the list is made, that owner finds the claim when it looks after
publishing, and does not report a commit that is ignored.

The upload process, which has no torch, loads this module: what needs the native one is lazy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tradewind.checkpoint.names import CommitName, accepted_file, parse_accepted, parse_claim

# A list of ten thousand commits takes half a megabyte.
MAX_LIST_BYTES = 64 << 20


@dataclass(frozen=True)
class Acceptance:
    """What the newest list says. `attempt` None: there is no list, every commit counts."""

    attempt: int | None = None
    folders: frozenset[str] = frozenset()

    def counts(self, name: CommitName) -> bool:
        """Whether a commit of that name counts."""
        return self.attempt is None or name.attempt >= self.attempt or name.folder in self.folders


def newest_claim(file_names: Iterable[str]) -> int:
    """The highest attempt that was claimed, 0 where there is none."""
    return max((parse_claim(name) or parse_accepted(name) or 0 for name in file_names), default=0)


def acceptance(file_names: Iterable[str], read: Callable[[str], bytes]) -> Acceptance:
    """What decides among the files of ATTEMPTS. A damaged list leaves the decision to the one
    before it: what the damaged one shut out may then count, which is whole, if not wanted."""
    from tradewind.checkpoint.errors import DamagedCheckpointError

    attempts = sorted({found for name in file_names if (found := parse_accepted(name))})
    for attempt in reversed(attempts):
        try:
            return Acceptance(attempt, decode_list(read(accepted_file(attempt)), f"list {attempt}"))
        except DamagedCheckpointError:
            continue
    return Acceptance()


def encode_list(names: Iterable[CommitName]) -> bytes:
    """The file that says which commits of earlier attempts an owner goes on from."""
    folders = sorted(name.folder for name in names)
    return json.dumps({"accepted": folders, "crc32c": _sum(folders)}, indent=1).encode() + b"\n"


def decode_list(data: bytes, where: str) -> frozenset[str]:
    """The folders that `encode_list` wrote. Raises DamagedCheckpointError."""
    from tradewind.checkpoint import strict_json
    from tradewind.checkpoint.errors import DamagedCheckpointError

    value = strict_json.loads(data, where)
    folders = value.get("accepted") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(folders, list):
        raise DamagedCheckpointError(f"{where}: expected a list of accepted commits")
    if not all(isinstance(folder, str) for folder in folders):
        raise DamagedCheckpointError(f"{where}: expected names of folders")
    sum_ = _sum(folders)
    if value.get("crc32c") != sum_:
        got = strict_json.excerpt(value.get("crc32c"))
        raise DamagedCheckpointError(f'{where}: expected CRC32C "{sum_}", got {got}')
    return frozenset(folders)


def _sum(folders: list[str]) -> str:
    from tradewind._core import native

    return f"{native.crc32c(json.dumps(folders).encode()):08x}"
