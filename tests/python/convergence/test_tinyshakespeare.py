"""A small GPT (Radford et al., 2019) on the characters of tinyshakespeare reaches torch's loss in
every precision of the Engine: AdamW, a tied embedding, layer norm in 16 bits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convergence.training import (
    SHARED,
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

TEXT = SHARED / "tinyshakespeare.txt"
CONTEXT, WIDTH, HEADS = 32, 32, 2

pytestmark = pytest.mark.skipif(
    not TEXT.is_file(), reason="no ../shared/data/tinyshakespeare.txt beside this checkout"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.characters(indices) + self.places)))


def alphabet() -> list[str]:
    return sorted(set(TEXT.read_text(encoding="utf-8")))


def make_task() -> Task:
    index = {character: i for i, character in enumerate(alphabet())}
    text = torch.tensor([index[character] for character in TEXT.read_text(encoding="utf-8")])
    length = CONTEXT + 1
    train, rest = text[: -len(text) // 10], text[-len(text) // 10 :]
    held_out = rest[: 200 * length].view(200, length)

    def next_batch(generator: torch.Generator) -> Data:
        starts = torch.randint(len(train) - CONTEXT, (16, 1), generator=generator)
        windows = train[starts + torch.arange(length)]
        return windows[:, :-1], windows[:, 1:]

    options = {"lr": 3e-3, "weight_decay": 0.1}
    return Task(
        partial(GPT, len(index)),
        next_batch,
        (held_out[:, :-1], held_out[:, 1:]),
        recipe=tw.AdamW(**options),
        optimizer=partial(torch.optim.AdamW, **options),
        num_steps=200,
        clip_norm=0.5,
        # Measured: 1.1e-3 and 7.3e-3 over five seeds (float16: two), 0.045 over eight.
        bands=Bands(bits16=4e-3, bits8=1.5e-2, seeds=0.045),
    )


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task()


@pytest.fixture(scope="module")
def reference(task: Task) -> Outcome:
    return train_with_torch(task)


def test_torch_learns(task: Task, reference: Outcome) -> None:
    assert reference.after < math.log(len(alphabet())) - 1.2
    assert 0 < reference.num_clipped < task.num_steps


@pytest.mark.parametrize("options", VARIANTS)
def test_reaches_the_loss_of_torch(task: Task, reference: Outcome, options: dict[str, Any]) -> None:
    check_convergence(task, reference, options)


def test_recovers_from_an_overflow(task: Task, reference: Outcome) -> None:
    check_recovery(task, reference, "fp16")


def test_without_masters_it_would_not(task: Task, reference: Outcome) -> None:
    check_masters_are_needed(task, reference, torch.bfloat16)
