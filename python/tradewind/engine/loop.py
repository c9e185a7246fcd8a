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


def run_batches(
    engine: Engine, meter: Meter, loader: Iterable[Any], epochs: int, mode: Mode
) -> Iterator[Any]:
    """What `Engine.batches` returns; its arguments are checked there."""
    length = _length(loader)
    total = length * epochs if length is not None else None
    with contextlib.closing(Progress(total, mode=mode)) as progress:
        meter.start()
        for epoch in range(epochs):
            _set_epoch(loader, epoch)
            for batch, samples in _timed(loader, meter):
                yield _move(batch, engine.device)
                _show(progress, engine, samples)
        if engine.flush() is not None:
            _show(progress, engine, 0)


def _length(loader: Iterable[Any]) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader over an IterableDataset has __len__ and may not know
        return None


def _timed(loader: Iterable[Any], meter: Meter) -> Iterator[tuple[Any, int]]:
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        samples = count_samples(batch)
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
