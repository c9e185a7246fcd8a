"""Small models and data for the Engine's tests."""

from __future__ import annotations

import copy

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # No bias before batch norm: its gradient is rounding noise, which Adam would blow up.
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
    )


def batches(count: int, size: int = 8, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


class Tied(nn.Module):
    """Embedding and head share one Parameter; one parameter is frozen; one buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(indices))))


def twins(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    first = small_net(seed)
    return first, copy.deepcopy(first)


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, byte by byte."""
    return {
        name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in model.state_dict().items()
        if value.numel() and value.ndim
    }
