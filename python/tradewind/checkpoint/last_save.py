"""What a last save can still reach before the machine goes. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Reach = Literal["local and remote", "local", "remote", "skip"]


@dataclass(frozen=True)
class LastSave:
    """`reach`: where the last save should go. `reason`: one sentence for people. `needed_s` is what
    that takes as estimated (0 with "skip"), `left_s` what there is; infinite without a deadline."""

    reach: Reach
    reason: str
    needed_s: float
    left_s: float


@dataclass(frozen=True)
class Tier:
    """One place to save to. `rate`: bytes per second as measured by earlier saves, None where none
    was; `commit_s`: what a commit takes besides the bytes."""

    rate: float | None
    commit_s: float = 0.0

    def needed_s(self, num_bytes: int) -> float:
        """Raises ValueError for a rate or time that cannot be."""
        if not 0.0 <= self.commit_s < math.inf:
            raise ValueError(f"commit_s: expected seconds of 0 or more, got {self.commit_s}")
        if self.rate is None:
            return self.commit_s
        if not self.rate > 0.0:
            raise ValueError(f"rate: expected bytes per second above 0, got {self.rate}")
        return num_bytes / self.rate + self.commit_s


def plan_last_save(
    num_bytes: int,
    rate: float | None,
    commit_s: float,
    deadline_s: float | None,
    now_s: float,
    *,
    remote: Tier | None = None,
    saves_locally: bool = True,
    safety: float = 1.25,
) -> LastSave:
    """What can be done in time: bytes <= rate x (deadline - now - commit), estimates taken `safety`
    times as long.

    `now_s` is the step boundary at which the save would begin, so that detection and the current
    step are spent already. A tier that was never measured is tried: a save that is cut off commits
    nothing and costs nothing but the time that is lost anyway. The remote tier comes after the
    local one, and both together must be in time; if only the local one is, the upload is left to
    whoever finds the disk again, which is said.

    Args:
        num_bytes: of this rank's shard.
        rate, commit_s: of the local tier, as for `Tier`.
        deadline_s: when the machine goes, on the clock of `now_s`; None: not known.
        remote: the tier behind it, or the only one where `saves_locally` is False.

    Raises ValueError for a negative size, a safety below 1, or no tier at all.
    """
    if num_bytes < 0 or safety < 1.0 or (remote is None and not saves_locally):
        raise ValueError(
            "plan_last_save: expected num_bytes of 0 or more, safety of 1 or more and a tier to "
            f"save to, got {num_bytes}, {safety}, remote={remote}, saves_locally={saves_locally}"
        )
    left_s = math.inf if deadline_s is None else max(0.0, deadline_s - now_s)
    local_s = safety * Tier(rate, commit_s).needed_s(num_bytes) if saves_locally else 0.0
    remote_s = safety * remote.needed_s(num_bytes) if remote is not None else 0.0
    both_s = local_s + remote_s
    both: Reach = "local"
    if remote is not None:
        both = "local and remote" if saves_locally else "remote"
    if left_s > 0.0 and both_s <= left_s:
        return LastSave(both, f"{_about(num_bytes, both_s)}, {_left(left_s)}", both_s, left_s)
    if saves_locally and remote is not None and left_s > 0.0 and local_s <= left_s:
        reason = (
            f"{_about(num_bytes, local_s)} locally and {remote_s:.1f} s to upload, "
            f"{_left(left_s)}: the upload cannot be done in time, so this save is on the local "
            "disk alone"
        )
        return LastSave("local", reason, local_s, left_s)
    needed_s = local_s if saves_locally else remote_s
    reason = f"{_about(num_bytes, needed_s)}, {_left(left_s)}: no last save can be done in time"
    return LastSave("skip", reason, 0.0, left_s)


def _about(num_bytes: int, needed_s: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB take about {needed_s:.1f} s"


def _left(left_s: float) -> str:
    return "no deadline is known" if math.isinf(left_s) else f"{left_s:.1f} s are left"
