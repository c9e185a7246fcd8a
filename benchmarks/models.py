"""Networks that whole steps are measured on, each with a batch made once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))


@dataclass
class Task:
    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A GPT; embedding and head are not tied, so that no gradient waits for the other's."""

    def __init__(self, layers: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def transformer_task(*, layers: int, width: int, vocabulary: int, context: int, batch: int) -> Task:
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, context + 1))
    model = Transformer(layers, width, vocabulary, context)
    return Task(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def digits_task() -> Task:
    """The demo's net and batch size (examples/digits.py), on random images of its shape."""
    from digits import make_model

    torch.manual_seed(0)
    return Task(make_model(), torch.rand(64, 1, 8, 8), torch.randint(10, (64,)))


def cifar_task() -> Task:
    """A small convolutional net with batch norm on 32x32 images in colour."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2)):
        layers += [
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return Task(model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
