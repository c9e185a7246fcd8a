"""How ranks meet: connections of their own for gradients, and the check that all ranks share the
same thing in the same way. Nothing of the model is touched here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from tradewind._core import native

_READERS_WAIT = timedelta(seconds=5)
_MISSING_WAIT = timedelta(seconds=1)  # which is spent, as the missing ranks read nothing
_MOMENT_S = 0.3

# How many exchanges a group has made: the same on all of its ranks, as they make them in one order.
_num_made: MutableMapping[Any, int] = WeakKeyDictionary()


@dataclass(eq=False)
class Meeting:
    """Where the ranks of one exchange meet."""

    rank: int
    size: int
    store: c10d.Store
    prefix: str
    group: dist.ProcessGroup | None  # None: this process alone
    timeout: timedelta
    _counts: Counter[str] = field(default_factory=Counter)
    pid: int = field(default_factory=os.getpid)
    gpu_group: dist.ProcessGroup | None = None  # made when it is first needed

    def count(self, what: str) -> int:
        """How often this has been asked before: the same on all ranks that ask in one order."""
        self._counts[what] += 1
        return self._counts[what] - 1

    def connect(self, purpose: str = "gloo") -> ProcessGroupGloo:
        """Connections between all ranks, for this exchange and purpose alone.

        Raises SharingError naming the ranks that are missing.
        """
        try:
            self.store.set(f"{self.prefix}/here/{purpose}/{self.rank}", _who_am_i())
            return ProcessGroupGloo(
                c10d.PrefixStore(f"{self.prefix}/{purpose}", self.store),
                self.rank,
                self.size,
                self.timeout,
            )
        except RuntimeError as error:
            here = [f"{self.prefix}/here/{purpose}/{rank}" for rank in range(self.size)]
            raise native.SharingError(
                f"rank {self.rank}: could not connect all {self.size} ranks within "
                f"{self.timeout.total_seconds():g} s; {self._missing(here)} ({str(error)[:200]})"
            ) from error

    def check_agreement(self, facts: dict[str, Any]) -> None:
        """Raise ValueError, on every rank, where `facts` (JSON values) differ between ranks."""
        if self.size == 1:
            return
        text = json.dumps(facts, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        keys = [f"{self.prefix}/facts/{rank}" for rank in range(self.size)]
        digests = [f"{self.prefix}/digest/{rank}" for rank in range(self.size)]
        with self._awaiting(digests, "begin sharing"):
            self.store.set(keys[self.rank], text)
            self.store.set(digests[self.rank], digest)
            self.store.wait(digests, self.timeout)
            found = [value.decode() for value in self.store.multi_get(digests)]
            other = next((rank for rank in range(self.size) if found[rank] != found[0]), None)
            if other is None:
                return
            first, second = (json.loads(self.store.get(keys[rank])) for rank in (0, other))
        self._await_readers(_READERS_WAIT)
        raise ValueError(
            f"sharing: rank 0 and rank {other} differ in {_difference(first, second)}; start all "
            "ranks with the same model and options"
        )

    def tell_all(self, topic: str, text: str) -> list[str]:
        """What every rank says of `topic`, in rank order; once for each topic.

        Raises SharingError naming the ranks that are missing.
        """
        keys = [f"{self.prefix}/{topic}/{rank}" for rank in range(self.size)]
        with self._awaiting(keys, f"tell its {topic}"):
            self.store.set(keys[self.rank], text)
            self.store.wait(keys, self.timeout)
            return [value.decode() for value in self.store.multi_get(keys)]

    @contextlib.contextmanager
    def _awaiting(self, keys: list[str], what: str) -> Iterator[None]:
        """An error of the store becomes a SharingError that names the ranks without a key."""
        try:
            yield
        except RuntimeError as error:
            missing = self._missing(keys)
            self._await_readers(_MISSING_WAIT)
            raise native.SharingError(
                f"rank {self.rank}: waited {self.timeout.total_seconds():g} s for every rank to "
                f"{what}; {missing} ({str(error)[:200]})"
            ) from error

    def _await_readers(self, wait: timedelta) -> None:
        """Stay until every rank has read what is wrong: one of them may hold the store."""
        keys = [f"{self.prefix}/read/{rank}" for rank in range(self.size)]
        with contextlib.suppress(RuntimeError):
            self.store.set(keys[self.rank], "")
            self.store.wait(keys, min(self.timeout, wait))

    def check_usable(self) -> None:
        """Raise RuntimeError in a forked child, ValueError where the group has been destroyed."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"sharing was begun by process {self.pid}, and this is a fork of it; train in the "
                "process that made the GradientSharing or Engine"
            )
        check_alive(self.group)

    # --- what is asked while others are missing: answers may never come ---------------------------

    def _ask(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; None where the store does not answer within a moment."""
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(call())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_MOMENT_S)
        return answers[0] if answers else None

    def _missing(self, keys: list[str]) -> str:
        are_there = self._ask(lambda: [self.store.check([key]) for key in keys])
        if are_there is None:
            return "their store does not answer; it lives in rank 0, or in what started the ranks"
        missing = [str(rank) for rank, is_there in enumerate(are_there) if not is_there]
        return f"missing: rank {', '.join(missing)}" if missing else "all ranks were there"

    def _board(self) -> dict[int, str] | None:
        """What each rank said last of what it does; None where it cannot be known."""

        def read() -> dict[int, str]:
            keys = {rank: f"{self.prefix}/board/{rank}" for rank in range(self.size)}
            return {
                rank: self.store.get(key).decode().partition(" ")[2]
                for rank, key in keys.items()
                if self.store.check([key])
            }

        found: dict[int, str] | None = self._ask(read)
        return found

    def last_words(self) -> str:
        board = self._board()
        if board is None:
            return "their store does not answer"
        others = (rank for rank in range(self.size) if rank != self.rank)
        said = (
            f"rank {r} said last: {board[r]}" if r in board else f"rank {r} said nothing"
            for r in others
        )
        return "; ".join(said)

    def wait_until_others_know(self, until: float) -> None:
        """Stay until every rank has ended the exchange too, or until then (`time.monotonic()`)."""
        while time.monotonic() < until:
            board = self._board()
            if board is None or all(
                board.get(rank, "").startswith("ended") for rank in range(self.size)
            ):
                return
            time.sleep(0.05)


def meet(group: dist.ProcessGroup | None, timeout: timedelta) -> Meeting:
    """The ranks of `group`, of all where it is None, or this process alone.

    Raises ValueError for a group that has been destroyed or does not hold this rank.
    """
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return Meeting(0, 1, HashStore(), "tradewind", None, timeout)
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # GroupMember.NON_GROUP_MEMBER
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


# What is compared first: later ones follow from it.
_KEYS_FIRST = ("parameters", "buffers", "options")


def _difference(first: Any, second: Any, name: str = "") -> str:
    """The first difference between two JSON values, by its place in them."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = sorted(set(first) | set(second))
        keys.sort(key=lambda key: _KEYS_FIRST.index(key) if key in _KEYS_FIRST else 9)
        for key in keys:
            if first.get(key) != second.get(key):
                place = f"{name}.{key}" if name else key
                return _difference(first.get(key), second.get(key), place)
    elif isinstance(first, list) and isinstance(second, list):
        is_table = any(isinstance(value, list) for value in (*first, *second))
        for index, (a, b) in enumerate(zip(first, second, strict=False)):
            if is_table and a != b:
                return f"{name}[{index}]: {a!r} against {b!r}"
        if is_table:
            return f"{name}: {len(first)} against {len(second)}"
    return f"{name}: {first!r} against {second!r}"
