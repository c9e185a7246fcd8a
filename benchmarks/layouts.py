"""Sets of parameters that the step is measured on, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

CLIP_NORM = 0.5  # below the norm of every layout's gradients: clipping acts

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


class Values:
    """The same values for every candidate of a layout, drawn once."""

    def __init__(self, shapes: Shapes) -> None:
        self.num_elements = num_elements(shapes)
        generator = torch.Generator().manual_seed(0)
        self._parameters = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
        self.gradients = [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]

    def parameters(self, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        """New parameters without gradients."""
        return [torch.nn.Parameter(x.to(dtype, copy=True)) for x in self._parameters]

    def parameters_with_gradients(
        self, dtype: torch.dtype = torch.float32
    ) -> list[torch.nn.Parameter]:
        parameters = self.parameters(dtype)
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient.to(dtype, copy=True)
        return parameters
