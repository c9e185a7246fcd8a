"""What `tw.Checkpoint(...)` accepts, checked before anything is touched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from tradewind.checkpoint.interval import Every, parse_every, prior_mtbf

Notices = Literal["auto", "signals", "off"]
_NOTICES = ("auto", "signals", "off")


@dataclass(frozen=True)
class Checkpoint:
    """How an Engine saves, and where it finds what it goes on from.

    ::

        engine = tw.Engine(model, tw.AdamW(lr=1e-3), checkpoint=tw.Checkpoint(), run="runs/a")

    Args:
        path: directory of the checkpoints, which all ranks share, or a URL (`s3://BUCKET/PREFIX`,
            or any that fsspec knows); None: the place's (`TRADEWIND_CHECKPOINT_DIR`), else
            RUN/checkpoints. Of several ranks, that of rank 0.
        every: "auto" saves as often as pays (Daly's interval from what saves cost and how often the
            run fails); a number of updates; or a time, as a timedelta or as text ("10min").
        keep: how many of the newest checkpoints stay.
        keep_every: checkpoints of updates that are multiples of this stay, too.
        spot: whether the machines may be taken back at any time, which "auto" counts on before it
            has seen failures; None: not.
        mean_time_between_failures: of the whole run, in place of what `spot` assumes.
        local: of a URL, the directory on a fast disk of this machine that is written first; the
            upload follows behind training. None: one below ~/.cache/tradewind.
        store_options: of a URL, for `boto3.client("s3", ...)` or `fsspec.filesystem(...)`.
        notices: "auto" listens for SIGTERM and SIGUSR1 and asks the cloud's metadata service, where
            there is one, whether this machine is about to go; "signals" listens alone; "off". A
            notice leads to a last save at a step boundary, the same on all ranks, and ends the
            process with exit code 75.
        grace: between a signal and the kill that follows it, as the scheduler has it.
        paranoid: compare what is written in place with sums taken when the save began, which finds
            edits through `.data`, too; reads all state twice more.
        host_memory: bytes of memory for copies of what cannot be written from where it lies (state
            on GPUs, above all); None: as much as it takes. With less than that a save holds
            training until the last copy is made.
        peers: with several ranks, a process beside each rank keeps the newest shard of the rank
            before it in memory, so that ranks that are restarted read no disk.
        timeout: how long a save may take, and a rank wait for others, before the save counts as
            failed.

    Raises TypeError or ValueError for an argument that is not as described.
    """

    path: str | os.PathLike[str] | None = None
    every: Any = "auto"
    keep: int = 3
    keep_every: int | None = None
    spot: bool | None = None
    mean_time_between_failures: timedelta | None = None
    local: str | os.PathLike[str] | None = None
    store_options: dict[str, Any] | None = None
    notices: Notices = "auto"
    grace: timedelta = timedelta(seconds=30)
    paranoid: bool = False
    host_memory: int | None = None
    peers: bool = False
    timeout: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        if self.path is not None and not os.fspath(self.path):
            raise ValueError("path: expected a directory, got an empty path; name one")
        parse_every(self.every)
        _check_count("keep", self.keep)
        if self.keep_every is not None:
            _check_count("keep_every", self.keep_every)
        _check_switch("spot", self.spot, allows_none=True)
        _check_switch("paranoid", self.paranoid)
        _check_switch("peers", self.peers)
        if self.host_memory is not None:
            _check_count("host_memory", self.host_memory)
        if self.mean_time_between_failures is not None:
            _check_duration("mean_time_between_failures", self.mean_time_between_failures)
        _check_duration("timeout", self.timeout)
        _check_duration("grace", self.grace)
        if self.notices not in _NOTICES:
            raise ValueError(
                f"notices: expected one of {', '.join(_NOTICES)}, got {self.notices!r}"
            )

    @property
    def schedule(self) -> Every:
        """`every`, understood."""
        return parse_every(self.every)

    def described(self) -> dict[str, Any]:
        """What all ranks must have alike, as JSON values."""
        return {
            "every": str(self.schedule),
            "keep": self.keep,
            "keep_every": self.keep_every,
            "peers": self.peers,
        }

    def prior_mtbf(self, num_machines: int) -> timedelta:
        """Mean time between failures of a run on so many machines, before any was seen."""
        if self.mean_time_between_failures is not None:
            return self.mean_time_between_failures
        return prior_mtbf("spot" if self.spot else "on-demand", num_machines)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")


def _check_switch(name: str, value: Any, *, allows_none: bool = False) -> None:
    if not isinstance(value, bool) and not (allows_none and value is None):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def _check_duration(name: str, value: Any) -> None:
    if not isinstance(value, timedelta):
        raise TypeError(f"{name}: expected a datetime.timedelta, got {type(value).__name__}")
    if value <= timedelta(0):
        raise ValueError(f"{name}: expected a duration above 0, got {value}")
