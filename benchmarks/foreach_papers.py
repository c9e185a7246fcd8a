"""Lion and LAMB, which torch does not have, as one would write them with torch's `_foreach_`
operations: each formula in as few of them as it takes, buffers in place where that saves one."""

from __future__ import annotations

from typing import Any

import torch

Tensors = list[torch.Tensor]


class ForeachLion:
    """Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675),
    algorithm 2."""

    def __init__(self, parameters: Tensors, *, lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr, self.beta1, self.beta2, self.weight_decay = lr, 0.9, 0.99, weight_decay
        self.momenta = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self) -> None:
        gradients: Any = [parameter.grad for parameter in self.parameters]
        updates = torch._foreach_lerp(self.momenta, gradients, 1 - self.beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(self.parameters, 1 - self.lr * self.weight_decay)
        torch._foreach_add_(self.parameters, updates, alpha=-self.lr)
        torch._foreach_lerp_(self.momenta, gradients, 1 - self.beta2)


class ForeachLAMB:
    """You et al., 2020, "Large Batch Optimization for Deep Learning" (arXiv:1904.00962),
    algorithm 2, the ratio 1 where a norm is 0."""

    def __init__(self, parameters: Tensors, *, lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr, self.beta1, self.beta2, self.eps = lr, 0.9, 0.999, 1e-6
        self.weight_decay = weight_decay
        self.first = [torch.zeros_like(parameter) for parameter in parameters]
        self.second = [torch.zeros_like(parameter) for parameter in parameters]
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.num_steps += 1
        gradients: Any = [parameter.grad for parameter in self.parameters]
        torch._foreach_lerp_(self.first, gradients, 1 - self.beta1)
        torch._foreach_mul_(self.second, self.beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - self.beta2)
        directions = torch._foreach_sqrt(self.second)
        # m / c1 / (sqrt(v / c2) + eps) = m / (sqrt(v) * c1 / sqrt(c2) + c1 * eps)
        first_correction = 1 - self.beta1**self.num_steps
        second_correction = 1 - self.beta2**self.num_steps
        torch._foreach_mul_(directions, first_correction / second_correction**0.5)
        torch._foreach_add_(directions, first_correction * self.eps)
        directions = torch._foreach_div(self.first, directions)
        torch._foreach_add_(directions, self.parameters, alpha=self.weight_decay)
        own = torch.stack(torch._foreach_norm(self.parameters))
        other = torch.stack(torch._foreach_norm(directions))
        ratio = torch.where((own > 0) & (other > 0), own / other, 1.0) * -self.lr
        torch._foreach_mul_(directions, ratio.unbind())
        torch._foreach_add_(self.parameters, directions)
