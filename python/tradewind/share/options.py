"""What `tw.Share(...)` and `tw.GradientSharing(...)` accept, checked before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch.distributed as dist

Codec = Literal["none", "bf16", "fp16", "int8", "powersgd"]
Strategy = Literal["allreduce", "sharded", "hierarchical", "periodic"]
Overlap = Literal["auto", "backward", "next-forward"]

_MIB = 1024 * 1024
# A collective call of a GPU costs some ten microseconds whatever its size; there it is
# DistributedDataParallel's default.
_DEFAULT_BUCKET_MB = {"cpu": 4.0, "cuda": 25.0}


@dataclass(frozen=True)
class Share:
    """How an Engine shares gradients between ranks.

    On GPUs "sharded", "powersgd" and "next-forward" are refused by name, and "hierarchical" is
    "allreduce", as NCCL adds within a host first by itself.

    Args:
        codec: how gradients travel: "none" (as they are), "bf16", "fp16" (with a power of two per
            block of 512 that keeps finite values finite), "int8" (a scale per block of 512) or
            "powersgd": a matrix as the product of two thin ones of `powersgd_rank` columns
            (arXiv 1905.13727), where these have at most half its elements, everything else as it
            is; every overlap is "backward", as the second thin one waits for the mean of the
            first. What the codec loses is added to the next step's gradient (error feedback), and
            is part of checkpoints. Sums are taken in float32.
        strategy: "allreduce": every rank updates everything. "sharded": each rank sums, updates and
            stores the optimizer state of its shard alone. "hierarchical": first among the ranks of
            a host through shared memory, then between hosts, each of which sends 2(H-1)/H of the
            gradients' bytes however many ranks it has; on Linux, where all hosts have as many
            ranks, else as "allreduce", with a warning. Codecs apply between hosts. "periodic":
            ranks step on their own and average every `outer_every` steps (DiLoCo, arXiv
            2311.08105).
        overlap: "backward": all sums are done before the update, as DistributedDataParallel has
            it. "next-forward": each bucket's sum and update are done when the next forward first
            needs its parameters. "auto": the Engine measures both in its first steps and takes the
            faster one.
        deterministic: sums in rank order over a fixed layout, so that results do not depend on
            timing. On the CPU sums are always taken in this order, on GPUs NCCL has its own without
            it. "hierarchical", whose results do
            not depend on timing either, adds the ranks of each host and then the hosts' sums, which
            rounds differently: together they are refused.
        process_group: whose ranks share; None: all.
        bucket_mb: MiB of gradients that become ready together, up to; None: 4 on the CPU, 25 on
            GPUs.
        patience: a wait this long says on stderr who is late.
        timeout: a wait this long ends in `tw.SharingError` on every rank.
        powersgd_rank: of codec="powersgd"; torch's PowerSGD hook has 1, the paper 1 to 4.
        outer_every, outer_lr, outer_momentum: of strategy="periodic": updates between averages,
            and the outer step of SGD with Nesterov momentum (the paper's best for language models).
    """

    codec: Codec = "none"
    strategy: Strategy = "allreduce"
    overlap: Overlap = "auto"
    deterministic: bool = False
    process_group: dist.ProcessGroup | None = None
    bucket_mb: float | None = None
    patience: timedelta = timedelta(seconds=30)
    timeout: timedelta = timedelta(minutes=5)
    powersgd_rank: int = 4
    outer_every: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_choice("codec", self.codec, get_args(Codec))
        _check_choice("strategy", self.strategy, get_args(Strategy))
        _check_choice("overlap", self.overlap, get_args(Overlap))
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"deterministic: expected True or False, got {self.deterministic!r}")
        if self.deterministic and self.strategy == "hierarchical":
            raise ValueError(
                "deterministic=True: expected a strategy that adds all ranks in rank order, got "
                "'hierarchical', which adds the ranks of each host first; use "
                "strategy='allreduce', or deterministic=False: repeated runs on the same hosts "
                "agree to the bit either way"
            )
        if self.codec == "powersgd":
            self._check_powersgd()
        if self.bucket_mb is not None:
            _check_positive("bucket_mb", self.bucket_mb)
        for name in ("patience", "timeout"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise TypeError(
                    f"{name}: expected a datetime.timedelta, got {type(value).__name__}"
                )
            _check_positive(name, value.total_seconds())
        for name in ("powersgd_rank", "outer_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
        _check_positive("outer_lr", self.outer_lr)
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(
                f"outer_momentum: expected a number in [0, 1), got {self.outer_momentum!r}"
            )

    def _check_powersgd(self) -> None:
        if self.strategy == "sharded":
            raise ValueError(
                "codec='powersgd': expected a strategy in which every rank updates whole matrices, "
                "got 'sharded'; use strategy='allreduce' or codec='int8'"
            )
        if self.overlap == "next-forward":
            raise ValueError(
                "codec='powersgd': expected overlap='backward' or 'auto', got 'next-forward': the "
                "second half of what travels waits for all of the first; so little travels that "
                "there is nothing to hide"
            )

    def bucket_bytes(self, device_type: str) -> int:
        mib = _DEFAULT_BUCKET_MB[device_type] if self.bucket_mb is None else self.bucket_mb
        return max(1, int(mib * _MIB))

    def described(self) -> dict[str, Any]:
        """What all ranks must have alike."""
        return {
            "codec": self.codec,
            "strategy": self.strategy,
            "overlap": self.overlap,
            "bucket_mb": self.bucket_mb,
            "deterministic": self.deterministic,
            "powersgd_rank": self.powersgd_rank,
            "outer": [self.outer_every, self.outer_lr, self.outer_momentum],
        }


def _check_choice(name: str, given: Any, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {given!r}")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
