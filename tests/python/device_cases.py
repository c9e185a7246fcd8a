"""Two equal optimizers, one stepped on the CPU and one on a device, and how they compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from optimizer_cases import bits, parameter_like, parameters_of, random_gradients, set_gradients

import tradewind as tw

RULES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 0.05, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.05, "amsgrad": True, "betas": (0.9, 0.6)}),
    ("Adam", {"lr": 0.05, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"lr": 0.1, "momentum": 0.7, "nesterov": True, "maximize": True}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    ("LAMB", {"lr": 0.05, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Muon", {"lr": 0.01}),
]
STORAGES: list[dict[str, Any]] = [
    {},
    {"masters": "fp32"},
    {"masters": "split"},
    {"state_dtype": "fp32"},
    {"state_dtype": "bf16", "seed": 7},
    {"state_dtype": "8bit"},
    {"masters": "fp32", "state_dtype": "bf16"},
    {"masters": "split", "state_dtype": "8bit"},
]
SHAPES = [(1,), (0,), (7, 3), (300,), (4097,), (5, 60), (0,)]
MATRICES = [(7, 3), (0, 4), (33, 65), (3, 3), (64, 16), (4, 0)]


def tensors(rule: str, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = MATRICES if rule == "Muon" else SHAPES
    # Drawn in float64: some dtypes have no normal distribution on every device.
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def make(
    rule: str, given: Iterable[torch.Tensor], device: str = "cpu", **options: Any
) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(parameter_like(t).detach().to(device)) for t in given]
    return getattr(tw.optim, rule)(parameters, **options)


def give(
    optimizers: Sequence[torch.optim.Optimizer], seed: int, *, without: Sequence[int] = ()
) -> None:
    """Equal random gradients to all, but none to the parameters of these indices."""
    generator = torch.Generator().manual_seed(1000 + seed)
    gradients = random_gradients([p.cpu() for p in parameters_of(optimizers[0])], generator)
    for optimizer in optimizers:
        chosen = [
            None if index in without else gradient.to(parameter.device)
            for index, (gradient, parameter) in enumerate(
                zip(gradients, parameters_of(optimizer), strict=True)
            )
        ]
        set_gradients(optimizer, chosen)


def step_all(optimizers: Sequence[torch.optim.Optimizer], count: int = 3, first: int = 0) -> None:
    for seed in range(first, first + count):
        give(optimizers, seed)
        for optimizer in optimizers:
            optimizer.step()


def assert_same_bits(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Parameters and every entry of state, to the bit; NaN like NaN."""
    for index, (a, b) in enumerate(zip(parameters_of(ours), parameters_of(theirs), strict=True)):
        assert bits(a.cpu()) == bits(b.cpu()), f"parameter {index}"
        mine, reference = ours.state.get(a, {}), theirs.state.get(b, {})
        assert list(mine) == list(reference), f"parameter {index}"
        for name, value in mine.items():
            other = reference[name]
            assert value.dtype == other.dtype and value.shape == other.shape, name
            assert value.stride() == other.stride(), name
            assert bits(value.cpu()) == bits(other.cpu()), f"{name} of parameter {index}"
