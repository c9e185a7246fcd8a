"""The net whose gradients are shared, and one that sleeps where it would compute."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models import Task

BATCH = 96
WIDTH = 1024
NUM_LAYERS = 10
NUM_CLASSES = 10


@dataclass(frozen=True)
class Sleeps:
    """Seconds of a step's parts, slept instead of computed, so that more ranks than cores can
    share one machine; the update is always computed."""

    forward_s: float
    backward_s: float


# A core of an AMD EPYC 9004 with the net below; `share.py` takes what it measured itself if it can.
DEFAULT_SLEEPS = Sleeps(forward_s=0.025, backward_s=0.060)


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, layer: SleepingLayer
    ) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.sleeps.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer = ctx.layer
        time.sleep(layer.sleeps.backward_s)
        return gradient, layer.weight_gradient, layer.bias_gradient, None


class SleepingLayer(nn.Linear):
    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__(WIDTH, WIDTH)
        self.sleeps = sleeps
        self.weight_gradient = torch.randn_like(self.weight) * 1e-3
        self.bias_gradient = torch.randn_like(self.bias) * 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Asleep.apply(x, self.weight, self.bias, self)


def make_task(rank: int, sleeps: Sleeps | None = None) -> Task:
    """10.5M parameters in layers of one size; the same on all ranks, data of this rank's own."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        if sleeps is None:
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        else:
            each = Sleeps(sleeps.forward_s / NUM_LAYERS, sleeps.backward_s / NUM_LAYERS)
            layers.append(SleepingLayer(each))
    model = nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))
    torch.manual_seed(1 + rank)
    return Task(model, torch.randn(BATCH, WIDTH), torch.randint(NUM_CLASSES, (BATCH,)))


def num_elements() -> int:
    return NUM_LAYERS * WIDTH * (WIDTH + 1) + NUM_CLASSES * (WIDTH + 1)


GRADIENT_BYTES = 4 * num_elements()
