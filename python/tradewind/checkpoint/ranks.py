"""What ranks tell each other about a save: over connections of their own to the group's store, so
that a background thread never meets a collective call of the training loop. Every wait has a
deadline and names who did not answer. Polls, because a blocking wait would hold the connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tradewind.checkpoint.errors import CheckpointError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
# By members: the same on all ranks, which make them in one order.
_num_made: dict[str, int] = {}


class Ranks:
    """The ranks that save together. Alone (`size` 1) nothing is ever waited for. One thread at a
    time uses it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        deadline: timedelta = timedelta(minutes=10),
    ) -> None:
        self.deadline = deadline
        self.rank, self.size = 0, 1
        self._store: c10d.Store | None = None
        self._given_up = ""
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                "process_group: this process is not in it; make the Checkpointer on the ranks that "
                "save together"
            )
        if self.size > 1:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            members = "-".join(map(str, ranks))
            count = _num_made[members] = _num_made.get(members, -1) + 1
            own = _own_connection(c10d._get_default_store())
            self._store = c10d.PrefixStore(f"tradewind/checkpoint/{members}/{count}", own)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def give_up(self, why: str) -> None:
        """From any thread: whoever waits for other ranks stops waiting, with a CheckpointError."""
        self._given_up = why

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Every rank's JSON value of `topic`, in rank order, on every rank. Each topic once.

        Raises CheckpointError naming the ranks that said nothing until the deadline.
        """
        if self._store is None:
            return [value]
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._await(keys, topic, lambda key: f"rank {key.rsplit('/', 1)[1]}")
        return [json.loads(self._store.get(key)) for key in keys]

    def broadcast(self, topic: str, value: Any = None) -> Any:
        """Rank 0's JSON value of `topic`. Each topic once."""
        if self._store is None:
            return value
        if self.is_first:
            self._store.set(topic, json.dumps(value))
            return value
        self._await([topic], topic, lambda _: "rank 0")
        return json.loads(self._store.get(topic))

    def together(self, topic: str, do: Callable[[], Any]) -> list[Any]:
        """Run `do` on every rank and return what each gave (JSON values), in rank order.

        Raises on every rank where it raised on any: CheckpointError naming the ranks and what they
        said; the rank's own error where it alone failed here.
        """
        error: Exception | None = None
        value: Any = None
        try:
            value = do()
        except Exception as caught:
            error = caught
        if self._store is None:
            if error is not None:
                raise error
            return [value]
        told = self.gather(topic, {"error": _text(error)} if error else {"value": value})
        failed = [
            f"rank {rank}: {said['error']}" for rank, said in enumerate(told) if "error" in said
        ]
        if error is not None and len(failed) == 1:
            raise error
        if failed:
            raise CheckpointError("; ".join(failed)) from error
        return [said["value"] for said in told]

    def _await(self, keys: list[str], topic: str, name: Callable[[str], str]) -> None:
        assert self._store is not None
        until = time.monotonic() + self.deadline.total_seconds()
        pause = _FIRST_PAUSE_S
        while not self._store.check(keys):
            if self._given_up:
                raise CheckpointError(self._given_up)
            if time.monotonic() >= until:
                missing = [name(key) for key in keys if not self._store.check([key])]
                raise CheckpointError(
                    f"rank {self.rank}: waited {self.deadline.total_seconds():g} s for "
                    f"{', '.join(missing)} at {topic!r} of a checkpoint; is that rank alive, and "
                    "does it save as often as the others?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _own_connection(store: c10d.Store) -> c10d.Store:
    """One that no blocking call of another thread holds, where the store has connections."""
    try:
        return store.clone()  # type: ignore[attr-defined, no-any-return]
    except (RuntimeError, NotImplementedError):  # a file or a table of this process
        return store


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"
