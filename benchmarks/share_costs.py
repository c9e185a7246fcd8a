"""What a step is made of, measured apart: the costs that share_model.py predicts from."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from measuring import Figure, summary
from models import loss_of
from share_net import GRADIENT_BYTES
from share_stepper import Rank

ROUNDS = 12
WARMUPS = 3


class LayerClock:
    """When each layer begins its forward and has its gradients, of one step."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [layer for layer in model if list(layer.parameters())]
        self._began: list[float] = []
        self._ready: dict[int, float] = {}
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_: self._began.append(time.perf_counter()))
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._ready.update({index: time.perf_counter()})
                )

    def read(self, forward_ended: float) -> tuple[list[float], list[float]]:
        """Seconds of each layer's forward and of its backward, in forward order."""
        ends = [*self._began[1:], forward_ended]
        forward = [end - began for began, end in zip(self._began, ends, strict=True)]
        ready = [self._ready[index] for index in range(len(self.layers))]
        began = [*ready[1:], forward_ended]
        backward = [end - start for start, end in zip(began, ready, strict=True)]
        self._began.clear()
        self._ready.clear()
        return forward, backward


def _layers(rank: Rank) -> tuple[list[dict[str, Any]], Figure]:
    task = rank.task()
    clock = LayerClock(task.model)
    optimizer = torch.optim.AdamW(task.model.parameters(), fused=True)
    forwards, backwards, updates = [], [], []
    for _ in range(WARMUPS + ROUNDS):
        loss = loss_of(task.model(task.inputs), task.targets)
        forward_ended = time.perf_counter()
        loss.backward()
        began = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - began)
        optimizer.zero_grad()
        forward, backward = clock.read(forward_ended)
        forwards.append(forward)
        backwards.append(backward)
    layers = [
        {
            "bytes": sum(4 * p.numel() for p in layer.parameters()),
            "forward_s": summary(list(forward)),
            "backward_s": summary(list(backward)),
        }
        for layer, forward, backward in zip(
            clock.layers,
            zip(*forwards[WARMUPS:], strict=True),
            zip(*backwards[WARMUPS:], strict=True),
            strict=True,
        )
    ]
    return layers, summary(updates[WARMUPS:])


def _timed(run: Any) -> list[float]:
    seconds = []
    for _ in range(WARMUPS + ROUNDS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds[WARMUPS:]


def measure_costs(rank: Rank) -> dict[str, Any]:
    """Every rank measures at once, as they compute at once in a step."""
    group = rank.group("wire")
    dist.barrier(group=group)
    layers, update = _layers(rank)
    dist.barrier(group=group)
    a, b = torch.zeros(2**20), torch.ones(2**20)
    sums = _timed(lambda: a.add_(b))
    dist.barrier(group=group)
    word = torch.zeros(1)
    hops = max(1, 2 * (rank.count - 1))
    messages = _timed(lambda: dist.all_reduce(word, group=group))
    return {
        "layers": layers,
        "update_s_per_byte": {x: y if x == "n" else y / GRADIENT_BYTES for x, y in update.items()},
        "update_s": update,
        "sum_s_per_byte": summary([x / (4 * 2**20) for x in sums]),
        "latency_s": summary([x / hops for x in messages]),
    }
