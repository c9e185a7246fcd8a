"""A small model, batches of each rank, and the means that ranks get, computed by one process."""

from __future__ import annotations

import torch
from torch import nn


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 1))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients_of(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model(inputs).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def mean(gradients: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, as the exchange adds."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total / len(gradients)


def means(model: nn.Module, num_ranks: int, step: int = 0) -> list[torch.Tensor]:
    """What the ranks get, computed by one process."""
    of_ranks = [gradients_of(model, batch(rank, step)) for rank in range(num_ranks)]
    return [mean(list(same)) for same in zip(*of_ranks, strict=True)]


def equal(given: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


class Paths(nn.Module):
    """`used` says which layers a forward goes through; all of one input size."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(num_layers))

    def forward(self, inputs: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for index in used:
            inputs = self.layers[index](inputs)
        return inputs.sum()

    def grad(self, index: int) -> torch.Tensor | None:
        return self.layers[index].weight.grad
