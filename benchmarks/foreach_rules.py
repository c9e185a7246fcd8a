"""Lion and LAMB as PyTorch users write them fast, in `torch._foreach_` calls over all parameters:
the peers where torch has no optimizer of its own."""

from __future__ import annotations

import torch
from torch import nn


class ForeachLion:
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr, self.weight_decay = lr, weight_decay
        self.averages = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        beta1, beta2 = 0.9, 0.99
        gradients = [p.grad for p in self.parameters]
        updates = torch._foreach_mul(self.averages, beta1)
        torch._foreach_add_(updates, gradients, alpha=1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(self.parameters, 1 - self.lr * self.weight_decay)
        torch._foreach_add_(self.parameters, updates, alpha=-self.lr)
        torch._foreach_mul_(self.averages, beta2)
        torch._foreach_add_(self.averages, gradients, alpha=1 - beta2)


class ForeachLAMB:
    """You et al. 2020 (arXiv:1904.00962), algorithm 2, with bias correction."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr, self.weight_decay = lr, weight_decay
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        beta1, beta2, eps = 0.9, 0.999, 1e-6
        self.num_steps += 1
        gradients = [p.grad for p in self.parameters]
        torch._foreach_lerp_(self.first, gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_div(self.second, 1 - beta2**self.num_steps)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, eps)
        updates = torch._foreach_div(self.first, 1 - beta1**self.num_steps)
        torch._foreach_div_(updates, denominators)
        torch._foreach_add_(updates, self.parameters, alpha=self.weight_decay)
        ratios = [
            torch.where((p > 0) & (u > 0), p / u, 1.0) * -self.lr
            for p, u in zip(
                torch._foreach_norm(self.parameters), torch._foreach_norm(updates), strict=True
            )
        ]
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(self.parameters, updates)
