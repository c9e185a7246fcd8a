"""What a contender is told about its rank, and what it makes of it: something that can step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Task, loss_of
from share_net import Sleeps, make_task

LEARNING_RATE = 1e-3


@dataclass
class Rank:
    """What a contender is told; a process group of its own, so that one that breaks spoils no
    other. Ours take the default group, as the Engine does."""

    index: int
    count: int
    sleeps: Sleeps | None = None
    groups: dict[str, Any] = field(default_factory=dict)

    def task(self) -> Task:
        return make_task(self.index, self.sleeps)

    def group(self, name: str) -> Any:
        if name not in self.groups:
            self.groups[name] = dist.new_group(backend="gloo")
        return self.groups[name]


@dataclass
class Stepper:
    """`step` may leave work behind that `settle` waits for, as the next step would."""

    step: Callable[[], object]
    settle: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


def training(task: Task, model: nn.Module) -> Callable[[], None]:
    """A plain loop's step: forward, backward and torch's fused AdamW."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        loss_of(model(task.inputs), task.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
