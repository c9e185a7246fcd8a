"""Loaders whose batches draw random numbers of every kind, and a run over them that can stop after
some batches, give its data position, and go on from it as another process would."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tradewind as tw
from tradewind.checkpoint.rebuilding import rebuild
from tradewind.checkpoint.tree import flatten
from tradewind.engine.data_position import DataPosition
from tradewind.engine.loop import run_batches

NUM_SAMPLES = 22  # of batches of 4: five and a short one
EPOCHS = 3


def noisy(index: int) -> torch.Tensor:
    """A sample and what augmentation draws for it, of every generator there is."""
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
    return torch.tensor([float(index), *drawn])


class Noisy(Dataset[torch.Tensor]):
    """Counts what is loaded in this process."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples
        self.num_loaded = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_loaded += 1
        return noisy(index)


class NoisyStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (noisy(index) for index in range(NUM_SAMPLES))


class NoisyIterable:
    """No DataLoader, no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(6):
            yield torch.stack([noisy(random.randrange(100)) for _ in range(4)])


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


Make = Callable[[], Any]


@dataclass
class Outcome:
    seen: list[Any] = field(default_factory=list)  # every batch that was trained on, as lists
    state: Any = None  # of the data, where the run stopped
    said: list[str] = field(default_factory=list)
    loader: Any = None
    steps: int = 0


def engine_of(accumulate: int = 1, **options: Any) -> tw.Engine:
    return tw.Engine(nn.Linear(4, 1), tw.SGD(lr=1e-3), accumulate=accumulate, **options)


def through_checkpoint(state: Any) -> Any:
    """What a checkpoint would hold of `state`, read back by the same rank."""
    flat = flatten(state)
    tree, own = json.loads(json.dumps([flat.tree, flat.own_tree]))
    tensors = {name: copy.deepcopy(tensor) for name, tensor in flat.tensors.items()}
    tensors.update({name: copy.deepcopy(value) for name, value in flat.own_tensors.items()})
    return rebuild(tree, tensors, own)


def run(
    make: Make,
    *,
    stop: int | None = None,
    state: Any = None,
    epochs: int = EPOCHS,
    accumulate: int = 1,
    seed: int = 0,
    new_epoch: bool = False,
) -> Outcome:
    """Train on the batches of `make()`; with `stop`, give the state after so many of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    found = Outcome(loader=make())
    position = DataPosition(say=found.said.append)
    if state is not None:
        position.load_state_dict(state)
        if new_epoch:
            position.begin_epoch_anew()
    with engine_of(accumulate) as engine:
        reading = run_batches(engine, engine._meter, found.loader, epochs, "off", position)
        for batch in reading:
            found.seen.append(batch.tolist())
            (
                random.random(),
                torch.rand(7),
            )  # what a model draws depends on no data, and on no resume
            engine.step(engine(batch).sum())
            if len(found.seen) == stop:
                found.state = through_checkpoint(position.state_dict())
                break
        if stop is None:
            found.state = through_checkpoint(position.state_dict())
        found.steps = engine.num_steps
    return found


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), **{"batch_size": 4, **options})
