"""Parameters and gradients that the benchmarks of the step work on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

CLIP_NORM = 0.5
Shapes = list[tuple[int, ...]]


def gpt2_small() -> Shapes:
    """The 148 parameters of GPT-2 small (124M; Radford et al., 2019), head tied."""
    width = 768
    block: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *(block * 12), (width,), (width,)]


LAYOUTS: dict[str, Callable[[], Shapes]] = {
    "one 64M": lambda: [(64 * 1024 * 1024,)],
    "GPT-2 small, 148": gpt2_small,
    "3,000 x 1k": lambda: [(1024,)] * 3000,
}


def num_elements(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def make_parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters with gradients, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * 0.01).to(dtype)
        parameters.append(parameter)
    return parameters


class Backward:
    """A graph over parameters whose backward writes each gradient anew, one after the other, from
    an array of its size: what a model's backward does, without the model."""

    def __init__(self, shapes: Shapes, gradients: list[torch.Tensor]) -> None:
        self.parameters = make_parameters(shapes)
        self.gradients = gradients
        self.loss = torch.zeros(())

    @staticmethod
    def gradients_for(shapes: Shapes) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]

    def forward(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        pairs = zip(self.parameters, self.gradients, strict=True)
        self.loss = torch.stack([(p * gradient).sum() for p, gradient in pairs]).sum()
