"""scikit-learn's handwritten digits reach torch's loss in every precision of the Engine."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convergence.training import (
    VARIANTS,
    Bands,
    Data,
    Outcome,
    Task,
    check_convergence,
    check_masters_are_needed,
    check_recovery,
    train_with_torch,
)
from torch import nn

import tradewind as tw


class UnitLinear(nn.Module):
    """A linear layer whose weights are of size 1, divided in the forward by the root of their
    number. Near 1, float16 has steps of 2**-11 to 2**-10 and bfloat16 eight times those: an update
    of 2**-11 or less is lost without masters, where the small weights of nn.Linear would take it.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) * self.weight.shape[1] ** -0.5


def make_model() -> nn.Module:
    return nn.Sequential(
        UnitLinear(64, 256), nn.ReLU(), UnitLinear(256, 256), nn.ReLU(), UnitLinear(256, 10)
    )


def load() -> tuple[Data, Data]:
    datasets = pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    digits = datasets.load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1400], order[1400:]
    return (images[train], labels[train]), (images[held_out], labels[held_out])


def make_task() -> Task:
    (images, labels), held_out = load()

    def next_batch(generator: torch.Generator) -> Data:
        rows = torch.randint(len(labels), (64,), generator=generator)
        return images[rows], labels[rows]

    options = {"lr": 1e-3, "weight_decay": 0.01}
    return Task(
        make_model,
        next_batch,
        held_out,
        recipe=tw.AdamW(**options),
        optimizer=partial(torch.optim.AdamW, **options),
        num_steps=400,
        clip_norm=0.1,
        # Measured: 3e-4 and 3e-3 over five seeds (float16: two), 0.0094 over eight.
        bands=Bands(bits16=1e-3, bits8=8e-3, seeds=0.009),
    )


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task()


@pytest.fixture(scope="module")
def reference(task: Task) -> Outcome:
    return train_with_torch(task)


def test_torch_learns(task: Task, reference: Outcome) -> None:
    assert reference.after < math.log(10) / 2
    assert 0 < reference.num_clipped < task.num_steps


@pytest.mark.parametrize("options", VARIANTS)
def test_reaches_the_loss_of_torch(task: Task, reference: Outcome, options: dict[str, Any]) -> None:
    check_convergence(task, reference, options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_backward_reaches_the_loss_of_torch(task: Task, precision: str) -> None:
    unclipped = dataclasses.replace(task, clip_norm=None)  # which in-backward excludes
    options = {"precision": precision, "update": "in-backward"}
    check_convergence(unclipped, train_with_torch(unclipped), options)


@pytest.mark.parametrize("precision", ["fp16", "amp-fp16"])
def test_recovers_from_an_overflow(task: Task, reference: Outcome, precision: str) -> None:
    check_recovery(task, reference, precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_without_masters_it_would_not(task: Task, reference: Outcome, dtype: torch.dtype) -> None:
    check_masters_are_needed(task, reference, dtype)
