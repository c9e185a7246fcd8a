"""torch's learning-rate schedulers of an optimizer: those that nobody keeps the state of."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


def untracked_schedulers(optimizer: torch.optim.Optimizer, tracked: Iterable[Any]) -> list[str]:
    """The classes of torch's schedulers of this optimizer that none of `tracked` is or holds."""
    if not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        return []  # no scheduler was ever made of it
    known: set[int] = set()
    waiting = list(tracked)
    while waiting:
        value = waiting.pop()
        known.add(id(value))
        waiting += [each for each in getattr(value, "_schedulers", []) if id(each) not in known]
    schedulers = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    parts = {id(part) for each in schedulers for part in getattr(each, "_schedulers", [])}
    return sorted(
        type(each).__name__
        for each in schedulers
        if each.optimizer is optimizer and id(each) not in known | parts
    )
