"""One training, written twice: with plain torch in float32, and with the Engine in any precision.
Same seed, same initial values, same batches in the same order, same learning rates; then the loss
over the whole held-out set, in eval mode. Each task states the bands within which they agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tradewind as tw

SHARED = Path(__file__).parents[4] / "shared" / "data"

Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Bands:
    """Largest difference from torch's loss, as a fraction of what torch's training took off it.

    bits16: forward, gradients or state rounded to 16 bits. bits8: state of 8 bits, whose rounding
    is noise of some percent in every update. seeds: the standard deviation that torch's own loss
    has from seed to seed; a band as wide as that would tell a user nothing.
    """

    bits16: float
    bits8: float
    seeds: float
    # The operations are torch's but for the last bits of the update, and the tasks are smooth
    # enough that these hardly grow: the farthest off was 4e-7, over five seeds of each task.
    float32: float = 2e-5

    def of(self, options: dict[str, Any]) -> float:
        if options.get("state_dtype") == "8bit":
            return self.bits8
        is_float32 = options.get("precision", "fp32") == "fp32" and "state_dtype" not in options
        return self.float32 if is_float32 else self.bits16


@dataclass(frozen=True)
class Task:
    """`make_model` draws from torch's generator; `next_batch` gives one of the training set.
    `recipe` is the Engine's optimizer, `optimizer` the same one of torch's, given parameters."""

    make_model: Callable[[], nn.Module]
    next_batch: Callable[[torch.Generator], Data]
    held_out: Data
    recipe: tw.Recipe
    optimizer: Callable[..., torch.optim.Optimizer]
    num_steps: int
    clip_norm: float | None
    bands: Bands


@dataclass(frozen=True)
class Outcome:
    """Held-out loss before training and after; how many updates were clipped and how many skipped;
    the loss scale after each step."""

    before: float
    after: float
    num_clipped: int
    num_skipped: int = 0
    loss_scales: tuple[float, ...] = ()


# Every precision, then what may be stored smaller in two of them.
VARIANTS = [
    pytest.param(options, id="-".join(options.values()))
    for options in (
        {"precision": "fp32"},
        {"precision": "amp-bf16"},
        {"precision": "amp-fp16"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "masters": "split"},
        {"precision": "fp32", "state_dtype": "bf16"},
        {"precision": "fp32", "state_dtype": "8bit"},
        {"precision": "bf16", "state_dtype": "bf16"},
        {"precision": "bf16", "state_dtype": "8bit"},
        {"precision": "bf16", "masters": "split", "state_dtype": "8bit"},
    )
]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def held_out_loss(model: Any, data: Data) -> float:
    model.eval()
    pieces = zip(*(part.split(100) for part in data), strict=True)
    total = sum(float(cross_entropy(model(x), y)) * len(x) for x, y in pieces)
    model.train()
    return total / len(data[0])


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A short warm-up, then half a cosine down to zero: its end is no noisy sample of the last
    batches, and its updates are the small ones that 16 bits alone would lose."""
    warmup = steps // 20

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_with_torch(
    task: Task, seed: int = 0, skip_at: int | None = None, round_to: torch.dtype | None = None
) -> Outcome:
    """The update of step `skip_at` is left out. `round_to`: every parameter is rounded to this
    dtype after each update, as parameters of 16 bits without masters would be."""
    torch.manual_seed(seed)
    model = task.make_model()
    optimizer = task.optimizer(model.parameters())
    scheduler = schedule(optimizer, task.num_steps)
    order = torch.Generator().manual_seed(seed)
    before = held_out_loss(model, task.held_out)
    num_clipped = 0
    for step in range(task.num_steps):
        x, y = task.next_batch(order)
        cross_entropy(model(x), y).backward()
        if task.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            num_clipped += int(norm > task.clip_norm)
        if step != skip_at:
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if round_to is not None:
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data.to(round_to))
    return Outcome(before, held_out_loss(model, task.held_out), num_clipped)


def train_with_engine(
    task: Task, seed: int = 0, overflow_at: int | None = None, **options: Any
) -> Outcome:
    """`options` are the Engine's. The loss of step `overflow_at` is multiplied beyond float16."""
    torch.manual_seed(seed)
    engine = tw.Engine(task.make_model(), task.recipe, clip_norm=task.clip_norm, **options)
    scheduler = schedule(engine.optimizer, task.num_steps)
    order = torch.Generator().manual_seed(seed)
    before = held_out_loss(engine, task.held_out)
    num_clipped = 0
    loss_scales = []
    for step in range(task.num_steps):
        x, y = task.next_batch(order)
        loss = cross_entropy(engine(x), y)
        result = engine.step(loss * 1e30 if step == overflow_at else loss)
        assert result.vetoed == (step == overflow_at)
        num_clipped += int(result.clip_factor < 1.0)
        loss_scales.append(engine.stats()["loss_scale"])
        scheduler.step()
    after = held_out_loss(engine, task.held_out)
    num_skipped = engine.stats()["num_skipped"]
    engine.close()
    return Outcome(before, after, num_clipped, num_skipped, tuple(loss_scales))


def distance(outcome: Outcome, reference: Outcome) -> float:
    """Signed, in units of `Bands`: positive where the outcome's loss is the larger."""
    return (outcome.after - reference.after) / (reference.before - reference.after)


def check_convergence(task: Task, reference: Outcome, options: dict[str, Any]) -> None:
    outcome = train_with_engine(task, **options)
    assert outcome.num_skipped == 0
    assert distance(outcome, reference) == pytest.approx(0.0, abs=task.bands.of(options))


def check_recovery(task: Task, reference: Outcome, precision: str) -> None:
    """One step in the middle overflows: it is skipped, the loss scale halves and grows again."""
    middle, growth = task.num_steps // 2, task.num_steps // 4
    scale = tw.LossScale(initial=2.0**12, growth_interval=growth)
    outcome = train_with_engine(task, overflow_at=middle, precision=precision, loss_scale=scale)
    scales = outcome.loss_scales
    assert outcome.num_skipped == 1
    assert scales[middle] == scales[middle - 1] / 2
    assert scales[middle + growth] == scales[middle - 1]
    # As if that update had never been due. Its loss itself may cost what a seed does.
    left_out = train_with_torch(task, skip_at=middle)
    assert distance(outcome, left_out) == pytest.approx(0.0, abs=task.bands.bits16)
    assert distance(outcome, reference) == pytest.approx(0.0, abs=task.bands.seeds)


def check_masters_are_needed(task: Task, reference: Outcome, dtype: torch.dtype) -> None:
    """Updates are small enough for 16 bits to lose them, so the bands above can tell."""
    rounded = train_with_torch(task, round_to=dtype)
    assert distance(rounded, reference) > 3 * task.bands.bits16
