"""Where batches come from: one class for each way to read a loader, all of them epoch by epoch,
from any batch on. An epoch's batches are numbered as the loader gives them, whoever takes them.

With a seed (that is, with checkpoints) reading draws its random numbers apart from the model's, so
that it can be repeated; without one it does as torch does."""

from __future__ import annotations

import contextlib
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from tradewind.engine.loader_workers import KeyedDataset, Shield, shield_worker_init, shielded
from tradewind.engine.random_stream import RandomStream, seed_cpu, seed_of, state_of, unseen
from tradewind.engine.sampler_state import generators_of, load_sampler_state

_CHUNK = 256  # batches of indices that are asked of a sampler at once


@dataclass
class Cut:
    """Which batches of an epoch this rank takes: rounds of `size` batches begin at `begin`, and
    rank r takes the r-th of each. Rounds go on across epochs. Where the loader shards itself, it
    gives this rank's batches only: every `size`-th of those that all ranks get."""

    rank: int = 0
    size: int = 1
    begin: int = 0
    shards_itself: bool | None = False  # None: not known yet

    @property
    def first(self) -> int:
        return self.begin // self.size if self.shards_itself else self.begin + self.rank

    @property
    def stride(self) -> int:
        return 1 if self.shards_itself else self.size

    def takes(self, index: int) -> bool:
        return index >= self.first and (index - self.first) % self.stride == 0

    def number(self, index: int) -> int:
        """Among the batches of all ranks."""
        return index * self.size + self.rank if self.shards_itself else index

    def taken(self, index: int) -> int:
        """How many batches of the epoch all ranks have taken after the round of this one: more than
        it has, where the round reaches into the next epoch."""
        return (index + 1) * self.size if self.shards_itself else index - self.rank + self.size

    def end_epoch(self, num_batches: int) -> None:
        """The next epoch's rounds: of those begun, what reaches into it."""
        if self.shards_itself:
            self.begin = 0
            return
        rounds = max(0, -(-(num_batches - self.first) // self.size))
        self.begin += rounds * self.size - num_batches

    def num_left(self, num_batches: int) -> int:
        """Batches of this rank to come in an epoch that has so many."""
        return max(0, -(-(num_batches - self.first) // self.stride))


class Source(ABC):
    """Reads `loader`. `num_batches` of an epoch is known once one was read to its end, or before
    where the loader knows it. `on_first` is told the first batch of the first epoch that is read
    from its beginning, or None where there is none; it may change the cut."""

    kind: ClassVar[str]
    reads_from_start = False  # what is skipped is read all the same

    def __init__(self, loader: Any, seed: int | None) -> None:
        self.loader = loader
        self.seed = seed
        self.num_batches: int | None = length_of(loader)
        self.on_first: Callable[[Any], None] | None = None
        self._shields: list[Shield] = []

    @abstractmethod
    def read(self, epoch: int, cut: Cut) -> Iterator[tuple[int, Any]]:
        """This rank's batches of an epoch, with their numbers in it."""

    def facts(self) -> dict[str, Any]:
        """What must be the same when the run goes on, as JSON values."""
        return {"way to read": self.kind, "batches": length_of(self.loader)}

    def place(self) -> Any:
        """This rank's place in the loader after the batch given last, for `own_state_of`; None
        where the batch's number says it."""
        return None

    def close(self) -> None:
        """Workers may be ended. Those that the loader keeps are shielded until this process ends,
        as they may serve the next call."""
        if not getattr(self.loader, "persistent_workers", False):
            for shield in self._shields:
                shield.lower()

    def _open(self) -> Iterator[Any]:
        """iter(loader), whose workers are shielded where runs go on from checkpoints."""
        if self.seed is None:
            return iter(self.loader)
        with shielded(self.loader) as shield:
            self._shields += [shield] if shield is not None else []
            return iter(self.loader)

    def _sift(self, batches: Iterator[Any], cut: Cut, index: int, around: Any) -> Iterator[Any]:
        """Of all batches, those that the cut takes. `index`: of the one that was read before."""
        while True:
            with around:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
            index += 1
            if index == 0:
                self._tell_first(batch)
            if cut.takes(index):
                yield index, batch
        if index < 0:
            self._tell_first(None)
        self.num_batches = index + 1

    def _tell_first(self, batch: Any) -> None:
        tell, self.on_first = self.on_first, None
        if tell is not None:
            tell(batch)


class IndexSource(Source):
    """A DataLoader over a dataset with `__getitem__`: its sampler gives the order, and what is
    skipped is not loaded. The order follows from `order_seed` and the epoch, and from generators of
    the sampler's own; every batch has random numbers of its own where there is a seed.

    `check` is told the epoch and a digest of how its order begins."""

    kind = "by index"

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int | None,
        *,
        order_seed: int,
        check: Callable[[int, str], None] | None = None,
    ) -> None:
        super().__init__(loader, seed)
        self._order_seed = order_seed
        self._check = check
        self._feed = _Feed()
        self._inner: DataLoader[Any] | None = self._loader_of(loader)

    def facts(self) -> dict[str, Any]:
        loader = self.loader
        return {
            "way to read": self.kind,
            "samples": length_of(loader.dataset),
            "batch size": loader.batch_size,
            "drop_last": bool(loader.drop_last),
            "sampler": type(loader.sampler).__name__,
            **super().facts(),
        }

    def read(self, epoch: int, cut: Cut) -> Iterator[tuple[int, Any]]:
        self._feed.given = self._given(epoch, cut)
        draws_here = self.seed is not None and self.loader.num_workers == 0
        with unseen() if self.seed is not None else contextlib.nullcontext():
            assert self._inner is not None
            batches = iter(self._inner)
        while True:
            with unseen() if draws_here else contextlib.nullcontext():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield self._feed.indices.popleft(), batch

    def close(self) -> None:
        for shield in self._shields:
            shield.lower()
        # Workers end as soon as the loader goes; in a cycle torch waits 10 s for each of them.
        self._inner = None
        self._feed.given = iter(())

    def _given(self, epoch: int, cut: Cut) -> Iterator[Any]:
        """What the fetching loader is to load."""
        self._feed.indices.clear()
        index = -1
        for index, samples in enumerate(self._order(epoch)):
            if not cut.takes(index):
                continue
            self._feed.indices.append(index)
            if self.seed is None:
                yield samples
            else:
                yield seed_of(self.seed, "batch", epoch, cut.number(index)), samples
        self.num_batches = index + 1

    def _order(self, epoch: int) -> Iterator[Any]:
        """The sampler's own, drawn apart from everything else."""
        loader = self.loader
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        stream = RandomStream(seed_of(self._order_seed, "order", epoch))
        with stream:
            order = iter(sampler)
            chunk = list(islice(order, _CHUNK))
        if self._check is not None:
            text = repr((length_of(loader), chunk))
            self._check(epoch, f"{zlib.crc32(text.encode()):08x}")
        while chunk:
            yield from chunk
            with stream:
                chunk = list(islice(order, _CHUNK))

    def _loader_of(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The same loader over what `_given` gives."""
        dataset, init, generator = loader.dataset, loader.worker_init_fn, loader.generator
        if self.seed is not None:
            dataset = KeyedDataset(dataset)
            generator = torch.Generator().manual_seed(seed_of(self.seed, "workers"))
            if loader.num_workers > 0:
                init = shield_worker_init(init, loader.multiprocessing_context)
                self._shields.append(init)
        batching: dict[str, Any] = {"batch_sampler": self._feed}
        if loader.batch_sampler is None:
            batching = {"batch_size": None, "sampler": self._feed}
        return DataLoader(
            dataset,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=init,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            in_order=True,  # a batch that may overtake another has no number
            **batching,
        )


class _Feed:
    """What the fetching loader is given in the epoch at hand, as a sampler; and the numbers of the
    batches on their way."""

    def __init__(self) -> None:
        self.given: Iterator[Any] = iter(())
        self.indices: deque[int] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self.given


class ListSource(Source):
    """A list of batches, or anything else that can be indexed."""

    kind = "from a list"

    def read(self, epoch: int, cut: Cut) -> Iterator[tuple[int, Any]]:
        self.num_batches = len(self.loader)
        for index in range(cut.first, self.num_batches, cut.stride):
            with unseen() if self.seed is not None else contextlib.nullcontext():
                if self.seed is not None:
                    seed_cpu(seed_of(self.seed, "batch", epoch, cut.number(index)))
                batch = self.loader[index]
            yield index, batch


class ReplaySource(Source):
    """Any other iterable: what is skipped is read and dropped."""

    kind = "from its start"
    reads_from_start = True

    def read(self, epoch: int, cut: Cut) -> Iterator[tuple[int, Any]]:
        around: Any = contextlib.nullcontext()
        if self.seed is not None:
            around = RandomStream(seed_of(self.seed, "stream", epoch))
        with around:
            batches = self._open()
        yield from self._sift(batches, cut, -1, around)


class StatefulSource(Source):
    """A loader with `state_dict` and `load_state_dict`, which knows its own place; but for its
    generators, of which torchdata's StatefulDataLoader forgets what it drew between two epochs.
    What its workers draw is its own matter."""

    kind = "by its state"

    def __init__(self, loader: Any, seed: int) -> None:
        super().__init__(loader, seed)
        self._seed = seed
        self._resumed: dict[str, Any] | None = None
        self._place: tuple[Any, ...] | None = None

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "loader": type(self.loader).__name__}

    def read(self, epoch: int, cut: Cut) -> Iterator[tuple[int, Any]]:
        resumed, self._resumed = self._resumed, None
        before = int(resumed["index"]) if resumed is not None else _ENDED
        if resumed is not None and before == _ENDED:
            leave_at(self.loader, resumed)
        elif resumed is not None:
            self.loader.load_state_dict(resumed["loader"])
        # What opening draws, and how often, does not count.
        with RandomStream(seed_of(self._seed, "open", epoch)):
            batches = self._open()
        stream = RandomStream(seed_of(self._seed, "stream", epoch))
        if resumed is not None and before != _ENDED:
            stream.load_state_dict(resumed["stream"])
            load_sampler_state(self.loader, resumed["generators"])
        for index, batch in self._sift(batches, cut, before, stream):
            # Before the next one is read, which may be ahead of its step.
            self._note(index, stream)
            yield index, batch
        self._note(_ENDED, stream)

    def place(self) -> Any:
        return self._place

    def _note(self, index: int, stream: RandomStream) -> None:
        generators = generators_of(self.loader)
        self._place = index, self.loader.state_dict(), stream.position(), generators

    def resume(self, own_state: dict[str, Any]) -> None:
        """The next `read` goes on after the batch that `own_state` is the place of."""
        self._resumed = own_state


_ENDED = -1  # in the place of a batch's number: an epoch was read to its end


def own_state_of(place: tuple[Any, ...] | None) -> dict[str, Any] | None:
    """What a checkpoint holds of a `place()`."""
    if place is None:
        return None
    index, loader, stream, generators = place
    return {
        "index": index,
        "loader": loader,
        "stream": state_of(stream),
        "generators": generators,
    }


def leave_at(loader: Any, own_state: dict[str, Any]) -> None:
    """Put a loader that knows its own place to where it was left, so that it begins an epoch as it
    would have done then."""
    loader.load_state_dict(own_state["loader"])
    with unseen():
        iter(loader)
    load_sampler_state(loader, own_state["generators"])


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # as over an IterableDataset that does not know
        return None


def num_left(source: Source, cut: Cut, first_epoch: int, epochs: int) -> int | None:
    """Batches of this rank in these epochs, where that is known."""
    each = source.num_batches
    if each is None or (cut.shards_itself is None):
        return None
    rest = Cut(cut.rank, cut.size, cut.begin, cut.shards_itself)
    total = 0
    for _ in range(first_epoch, epochs):
        total += rest.num_left(each)
        rest.end_epoch(each)
    return total
