"""The loop over batches: waits accounted, progress shown, the last short group applied."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_map

from tradewind.meter import Meter, count_samples
from tradewind.progress import Mode, Progress

if TYPE_CHECKING:
    import torch

    from tradewind.engine.engine import Engine
    from tradewind.engine.rank_batches import RankBatches


def run_batches(
    engine: Engine, meter: Meter, loader: Iterable[Any], epochs: int, mode: Mode
) -> Iterator[Any]:
    """What `Engine.batches` returns; its arguments are checked there."""
    sharing = engine._sharing
    rank_batches = sharing.batches_of(loader) if sharing is not None else None
    if rank_batches is not None:
        length = rank_batches.num_batches
        mode = mode if sharing is not None and sharing.rank == 0 else "off"
    else:
        length = _length(loader)
    total = length * epochs if length is not None else None
    with contextlib.closing(Progress(total, mode=mode)) as progress:
        meter.start()
        found = _epochs(loader, rank_batches, epochs, meter, engine.world_size)
        if sharing is not None:
            found = _announce_last(found, engine)
        num_batches = 0
        for batch, samples in found:
            num_batches += 1
            yield _move(batch, engine.device)
            _show(progress, engine, samples)
        if engine.flush() is not None:
            _show(progress, engine, 0)
        engine._has_next = True
        if sharing is not None:
            engine._follow_others(has_taken_part=num_batches > 0)


def _epochs(
    loader: Iterable[Any],
    rank_batches: RankBatches | None,
    epochs: int,
    meter: Meter,
    world_size: int,
) -> Iterator[tuple[Any, int]]:
    for epoch in range(epochs):
        _set_epoch(loader, epoch)
        if rank_batches is not None:
            rank_batches.set_epoch(epoch)
        yield from _timed(loader if rank_batches is None else rank_batches, meter, world_size)


def _announce_last(batches: Iterator[tuple[Any, int]], engine: Engine) -> Iterator[tuple[Any, int]]:
    """With the last batch the other ranks learn that this one has no more: one is read ahead."""
    ahead = next(batches, None)
    while ahead is not None:
        now, ahead = ahead, next(batches, None)
        engine._has_next = ahead is not None
        yield now


def _length(loader: Iterable[Any]) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader over an IterableDataset has __len__ and may not know
        return None


def _timed(loader: Iterable[Any], meter: Meter, world_size: int) -> Iterator[tuple[Any, int]]:
    """Batches, and how many samples all ranks took with each: as many as this one."""
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        samples = count_samples(batch) * world_size
        meter.batch(samples, time.perf_counter() - asked)
        yield batch, samples


def _set_epoch(loader: Iterable[Any], epoch: int) -> None:
    for target in (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if callable(getattr(target, "set_epoch", None)):
            target.set_epoch(epoch)  # type: ignore[union-attr]
            return


def _move(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    return tree_map(
        lambda value: value.to(device, non_blocking=True) if hasattr(value, "to") else value, batch
    )


def _show(progress: Progress, engine: Engine, samples: int) -> None:
    result = engine.last_result
    fields: dict[str, float | str] = {}
    if result is not None:
        fields["grad_norm"] = result.grad_norm
    progress.update(
        step=engine.num_steps,
        samples=samples,
        loss=(lambda: result.loss) if result is not None else None,
        fields=fields,
    )
