"""How ranks meet: connections of their own for gradients, and the check that all ranks share the
same thing in the same way. Nothing of the model is touched here."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tradewind._core import native

# How many exchanges a group has made: the same on all of its ranks, as they make them in one order.
_num_made: MutableMapping[Any, int] = WeakKeyDictionary()


@dataclass
class Meeting:
    """Where the ranks of one exchange meet."""

    rank: int
    size: int
    store: dist.Store
    prefix: str
    group: dist.ProcessGroup | None  # None: this process alone
    timeout: timedelta
    _counts: Counter[str] = field(default_factory=Counter)

    def count(self, what: str) -> int:
        """How often this has been asked before: the same on all ranks that ask in one order."""
        self._counts[what] += 1
        return self._counts[what] - 1

    def connect(self) -> dist.Backend:
        """Connections between all ranks, for this exchange alone.

        Raises SharingError naming the ranks that are missing.
        """
        self.store.set(f"{self.prefix}/here/{self.rank}", _who_am_i())
        try:
            return dist.ProcessGroupGloo(
                dist.PrefixStore(f"{self.prefix}/gloo", self.store),
                self.rank,
                self.size,
                self.timeout,
            )
        except RuntimeError as error:
            raise native.SharingError(
                f"rank {self.rank}: could not connect all {self.size} ranks within "
                f"{self.timeout.total_seconds():g} s; {self._absent()} ({str(error)[:200]})"
            ) from error

    def _absent(self) -> str:
        absent = [
            str(rank)
            for rank in range(self.size)
            if not self.store.check([f"{self.prefix}/here/{rank}"])
        ]
        return f"missing: rank {', '.join(absent)}" if absent else "all ranks were there"

    def check_agreement(self, facts: dict[str, Any]) -> None:
        """Raise ValueError, on every rank, where `facts` (JSON values) differ between ranks."""
        if self.size == 1:
            return
        text = json.dumps(facts, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        keys = [f"{self.prefix}/facts/{rank}" for rank in range(self.size)]
        digests = [f"{self.prefix}/digest/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], text)
        self.store.set(digests[self.rank], digest)
        try:
            self.store.wait(digests, self.timeout)
        except RuntimeError as error:
            raise native.SharingError(
                f"rank {self.rank}: waited {self.timeout.total_seconds():g} s for every rank to "
                f"begin sharing; {self._late(digests)}"
            ) from error
        found = [value.decode() for value in self.store.multi_get(digests)]
        other = next((rank for rank in range(self.size) if found[rank] != found[0]), None)
        if other is None:
            return
        first, second = (json.loads(self.store.get(keys[rank])) for rank in (0, other))
        raise ValueError(
            f"sharing: rank 0 and rank {other} differ in {_difference(first, second)}; start all "
            "ranks with the same model and options"
        )

    def _late(self, keys: list[str]) -> str:
        late = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        return f"missing: rank {', '.join(late)}"


def meet(group: dist.ProcessGroup | None, timeout: timedelta) -> Meeting:
    """The ranks of `group`, of all where it is None, or this process alone.

    Raises ValueError for a group that has been destroyed or does not hold this rank.
    """
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return Meeting(0, 1, dist.HashStore(), "tradewind", None, timeout)
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this rank is not one of its members; share among those")
    check_alive(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = c10d._get_process_group_store(group)
    number = _num_made.get(group, 0)
    _num_made[group] = number + 1
    prefix = f"tradewind/share/{c10d._get_process_group_name(group)}/{number}"
    return Meeting(rank, size, store, prefix, group, timeout)


def check_alive(group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    if not dist.is_initialized() or group not in c10d._world.pg_map:
        raise ValueError(
            "process_group: expected one that is alive, got one that has been destroyed; share "
            "before dist.destroy_process_group(), or make another group"
        )


def _who_am_i() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    for key in sorted(set(first) | set(second)):
        a, b = first.get(key), second.get(key)
        if a == b:
            continue
        if isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return f"{key}: {len(a)} against {len(b)}"
            index = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            return f"{key}[{index}]: {a[index]!r} against {b[index]!r}"
        return f"{key}: {a!r} against {b!r}"
    return "nothing that was compared"
