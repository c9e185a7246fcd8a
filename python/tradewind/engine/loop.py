"""The loop over batches: waits accounted, progress shown, the last short group applied."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_map

from tradewind.engine.batch_call import BatchCall, Spot
from tradewind.engine.batch_sources import Cut, ReplaySource, num_left
from tradewind.engine.data_position import DataPosition
from tradewind.meter import Meter, count_samples
from tradewind.progress import Mode, Progress

if TYPE_CHECKING:
    import torch

    from tradewind.engine.engine import Engine
    from tradewind.engine.rank_batches import RankBatches

Read = Iterator[tuple[Any, Spot | None]]
Timed = Iterator[tuple[Any, int, Spot | None]]


def run_batches(
    engine: Engine,
    meter: Meter,
    loader: Iterable[Any],
    epochs: int,
    mode: Mode,
    position: DataPosition | None = None,
) -> Iterator[Any]:
    """What `Engine.batches` returns; its arguments are checked there. With `position`, a run that
    was restored goes on where it was."""
    sharing = engine._sharing
    ranks = sharing.batches_of(loader) if sharing is not None else None
    if sharing is not None and sharing.rank > 0:
        mode = "off"
    call: BatchCall | None = None
    read: Read
    if position is not None:
        call = position.begin(loader, epochs, lambda: engine.num_steps, ranks)
        read, total, begin = call.read(_epoch_setter(loader)), call.num_left, call.num_taken
    else:
        (read, total), begin = _read(loader, epochs, ranks), 0
    if call is not None and call.is_skipped:
        return
    total = total + begin if total is not None else None
    with (
        contextlib.closing(Progress(total, mode=mode, initial_batches=begin)) as progress,
        _open_loop(engine),
    ):
        meter.start()
        found = _timed(read, meter, engine.world_size)
        if sharing is not None:
            found = _announce_last(found, engine)
        if call is not None and call.is_restored:
            first = next(found, None)
            has_any = first is not None
            if not (has_any if ranks is None else ranks.any_has(has_any)):
                call.finished()
                return
            found = chain([first] if first is not None else [], found)
        num_batches = 0
        try:
            for batch, samples, spot in found:
                num_batches += 1
                if call is not None and spot is not None:
                    call.yielding(spot)
                yield _move(batch, engine.device)
                _show(progress, engine, samples)
                if engine._num_open_loops == 1:  # else the body of an outer loop is not done yet
                    engine._boundary()
        except BaseException:
            if call is not None:
                call.end("left")
            raise
        if engine.flush() is not None:
            _show(progress, engine, 0)
        if call is not None:
            call.end("end")
        engine._has_next = True
        if engine._num_open_loops == 1:
            engine._boundary()
        if sharing is not None:
            engine._follow_others(has_taken_part=num_batches > 0)


@contextlib.contextmanager
def _open_loop(engine: Engine) -> Iterator[None]:
    engine._num_open_loops += 1
    try:
        yield
    finally:
        engine._num_open_loops -= 1


def _read(loader: Iterable[Any], epochs: int, ranks: RankBatches | None) -> tuple[Read, int | None]:
    """This rank's batches where no checkpoint will ask for them again, and how many they are."""
    cut = ranks.cut() if ranks is not None else Cut()
    source = ranks.source(cut) if ranks is not None else ReplaySource(loader, None)

    def read() -> Read:
        set_epoch = _epoch_setter(loader)
        for epoch in range(epochs):
            set_epoch(epoch)
            for _, batch in source.read(epoch, cut):
                yield batch, None
            assert source.num_batches is not None
            cut.end_epoch(source.num_batches)

    return read(), num_left(source, cut, 0, epochs)


def _announce_last(batches: Timed, engine: Engine) -> Timed:
    """With the last batch the other ranks learn that this one has no more: one is read ahead."""
    ahead = next(batches, None)
    while ahead is not None:
        now, ahead = ahead, next(batches, None)
        engine._has_next = ahead is not None
        yield now


def _timed(batches: Read, meter: Meter, world_size: int) -> Timed:
    """Batches, and how many samples all ranks took with each: as many as this one."""
    while True:
        asked = time.perf_counter()
        try:
            batch, spot = next(batches)
        except StopIteration:
            return
        samples = count_samples(batch) * world_size
        meter.batch(samples, time.perf_counter() - asked)
        yield batch, samples, spot


def _epoch_setter(loader: Iterable[Any]) -> Callable[[int], None]:
    for target in (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        set_epoch = getattr(target, "set_epoch", None)
        if callable(set_epoch):
            found: Callable[[int], None] = set_epoch
            return found
    return lambda epoch: None


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
