"""Each rank's part of a loader's batches: of N ranks, rank r takes batches r, r + N, r + 2N ... of
one order that all ranks share, so that a step takes N neighbouring batches. Cut at the source:
other ranks' samples are not even read, where the loader says which ones they are."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tradewind.engine.batch_sources import Cut, IndexSource, ListSource, ReplaySource, Source
from tradewind.engine.random_stream import seed_of
from tradewind.share.rendezvous import Meeting


class RankBatches:
    """How the ranks divide `loader`. Made by all of them in the same order.

    Loaders that shard already (a `DistributedSampler`, or an iterable whose first batch differs
    between ranks) are left alone.
    """

    def __init__(self, loader: Any, meeting: Meeting) -> None:
        self.loader = loader
        self._meeting = meeting
        self._is_first = True
        self.seed: int = _agree(meeting, torch.initial_seed() & (2**63 - 1))[0]
        self._number = meeting.count("batches")
        self._prefix = f"{meeting.prefix}/order/{self._number}"

    @property
    def rank(self) -> int:
        return self._meeting.rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def cut(self) -> Cut:
        shards_itself: bool | None = None
        if isinstance(self.loader, DataLoader) and not _is_iterable(self.loader):
            shards_itself = isinstance(self.loader.sampler, DistributedSampler)
        elif isinstance(self.loader, Sequence):
            shards_itself = False
        return Cut(self.rank, self.size, shards_itself=shards_itself)

    def source(self, cut: Cut) -> Source:
        """Of this rank's batches, where no checkpoint will ask for them again."""
        if isinstance(self.loader, Sequence):
            return ListSource(self.loader, None)
        if has_indices(self.loader) and not cut.shards_itself:
            order_seed = seed_of(self.seed, "call", self._number)
            return IndexSource(self.loader, None, order_seed=order_seed, check=self.check_order)
        return self.decide(ReplaySource(self.loader, None), cut)

    def decide(self, source: Source, cut: Cut) -> Source:
        """Let the first batch that comes say whether the loader shards itself."""
        if cut.shards_itself is None:
            source.on_first = lambda batch: self._compare(batch, cut)
        return source

    def check_order(self, epoch: int, digest: str) -> None:
        """Ranks begin the first epoch together. They need not begin later ones so: then whoever
        comes later compares, and nobody waits."""
        meeting = self._meeting
        if self._is_first:
            self._is_first = False
            found = _agree(meeting, digest)
        else:
            keys = [f"{self._prefix}/{epoch}/{rank}" for rank in range(meeting.size)]
            meeting.store.set(keys[meeting.rank], digest)
            there = [key for key in keys if meeting.store.check([key])]
            found = [value.decode() for value in meeting.store.multi_get(there)]
        if len(set(found)) > 1:
            raise ValueError(
                "loader: its sampler gives another order on each rank, so that samples would be "
                "taken twice or never; give it a generator with the same seed on all ranks, or none"
            )

    def any_has(self, has: bool) -> bool:
        """Whether some rank has a batch. All ranks ask together."""
        return any(_agree(self._meeting, has))

    def _compare(self, first: Any, cut: Cut) -> None:
        digests = _agree(self._meeting, _digest(() if first is None else (first,)))
        cut.shards_itself = len(set(digests)) > 1
        if not cut.shards_itself and self.rank == 0:
            warnings.warn(
                "loader: its batches cannot be numbered beforehand, and all ranks see the same "
                "ones: each rank reads all and takes its part. Shard it by tw.place().rank, or "
                "use a dataset with __getitem__, to read only that",
                stacklevel=2,
            )


def has_indices(loader: Any) -> bool:
    """Whether the batches of `loader` can be had by the indices that its sampler gives."""
    return isinstance(loader, DataLoader) and not _is_iterable(loader)


def _is_iterable(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


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
