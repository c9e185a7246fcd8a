"""Each rank's part of a loader's batches: of N ranks, rank r takes batches r, r + N, r + 2N ... of
one order that all ranks share, so that a step takes N neighbouring batches. Cut at the source:
other ranks' samples are not even read, where the loader says which ones they are."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tradewind.share.rendezvous import Meeting


class RankBatches:
    """An iterable over this rank's part of `loader`, once an epoch.

    Loaders that shard already (a `DistributedSampler`, or an iterable whose first batch differs
    between ranks) are left alone.
    """

    def __init__(self, loader: Iterable[Any], meeting: Meeting) -> None:
        self.loader = loader
        self._meeting = meeting
        self._epoch = 0
        self._is_first = True
        self._seed = _agree(meeting, torch.initial_seed() & (2**63 - 1))[0]
        self._prefix = f"{meeting.prefix}/order/{meeting.count('batches')}"
        self._shards_itself: bool | None = None
        if isinstance(loader, DataLoader):
            self._shards_itself = isinstance(loader.sampler, DistributedSampler)

    @property
    def num_batches(self) -> int | None:
        """Of this rank and epoch, where it is known."""
        try:
            total = len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None
        if self._shards_itself:
            return total
        rank, size = self._meeting.rank, self._meeting.size
        return (total - rank + size - 1) // size

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        if self._shards_itself:
            return iter(loader)
        if _has_indices(loader):
            return iter(self._sharded(loader))  # type: ignore[arg-type]
        if isinstance(loader, Sequence):
            return iter(loader[self._meeting.rank :: self._meeting.size])
        return self._sift(iter(loader))

    def _sharded(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The same loader over this rank's batches of indices."""
        batches = loader.batch_sampler
        assert batches is not None
        with torch.random.fork_rng(devices=[]):
            # A sampler without a generator of its own draws its order from the global one here.
            torch.manual_seed((self._seed + self._epoch) % 2**63)
            order = list(batches)
        self._check_order(_digest(order))
        return DataLoader(
            loader.dataset,
            batch_sampler=order[self._meeting.rank :: self._meeting.size],
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )

    def _check_order(self, digest: str) -> None:
        """Ranks begin the first epoch together. They need not begin later ones so: then whoever
        comes later compares, and nobody waits."""
        meeting = self._meeting
        if self._is_first:
            self._is_first = False
            found = _agree(meeting, digest)
        else:
            keys = [f"{self._prefix}/{self._epoch}/{rank}" for rank in range(meeting.size)]
            meeting.store.set(keys[meeting.rank], digest)
            there = [key for key in keys if meeting.store.check([key])]
            found = [value.decode() for value in meeting.store.multi_get(there)]
        if len(set(found)) > 1:
            raise ValueError(
                "loader: its sampler gives another order on each rank, so that samples would be "
                "taken twice or never; give it a generator with the same seed on all ranks, or none"
            )

    def _sift(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Of batches that nobody can number beforehand: every N-th, where ranks see the same."""
        meeting = self._meeting
        first = list(islice(batches, 1))
        if self._shards_itself is None:
            self._shards_itself = len(set(_agree(meeting, _digest(first)))) > 1
            if not self._shards_itself and meeting.rank == 0:
                warnings.warn(
                    "loader: its batches cannot be numbered beforehand, and all ranks see the same "
                    "ones: each rank reads all and takes its part. Shard it by tw.place().rank, or "
                    "use a dataset with __getitem__, to read only that",
                    stacklevel=2,
                )
        if self._shards_itself:
            yield from first
            yield from batches
            return
        if meeting.rank == 0:
            yield from first
            skipped = meeting.size - 1
        else:
            skipped = meeting.rank - 1
        yield from islice(batches, skipped, None, meeting.size)


def _has_indices(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _agree(meeting: Meeting, value: Any) -> list[Any]:
    """Every rank's value."""
    found: list[Any] = [None] * meeting.size
    dist.all_gather_object(found, value, group=meeting.group)
    return found


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
