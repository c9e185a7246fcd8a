"""Parameters, gradients and options that the optimizers' tests share, and how they compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

import tradewind as tw

ADAMW_OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "weight_decay": 0.3},
    {"lr": 0.05, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 0.05, "amsgrad": True, "betas": (0.9, 0.6)},
    {"lr": 0.05, "maximize": True},
]
SGD_OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.3},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.7, "maximize": True, "weight_decay": 0.1},
]
RULES = [("AdamW", options) for options in ADAMW_OPTIONS] + [
    ("SGD", options) for options in SGD_OPTIONS
]
# One of each rule, with state and decay, where the options are not the point.
USUAL_RULES = [
    ("AdamW", {"lr": 0.05, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
]

# Shapes and memory orders: name -> a tensor made from a function like torch.randn.
LAYOUTS: dict[str, Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = {
    "zero_dim": lambda make: make(()),
    "empty": lambda make: make(0),
    "empty_matrix": lambda make: make(3, 0),
    "one": lambda make: make(1),
    "odd": lambda make: make(7),
    "over_a_block": lambda make: make(4097),  # one more than a norm block
    "matrix": lambda make: make(33, 65),
    "channels_last": lambda make: make(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "transposed": lambda make: make(5, 9).t(),
    "permuted": lambda make: make(3, 4, 5).permute(1, 2, 0),
    "row_gaps": lambda make: make(6, 10)[:, 2:7],
    "element_gaps": lambda make: make(6, 10)[:, ::2],
    "last_empty": lambda make: make(0),
}


def ours_and_torchs(
    rule: str, tensors: Iterable[torch.Tensor], options: dict[str, Any]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Our optimizer and torch's reference (one tensor at a time) over equal parameters."""
    tensors = list(tensors)
    ours = getattr(tw.optim, rule)([parameter_like(t) for t in tensors], **options)
    theirs = getattr(torch.optim, rule)(
        [parameter_like(t) for t in tensors], **options, foreach=False
    )
    return ours, theirs


def parameter_like(tensor: torch.Tensor) -> Parameter:
    """A parameter of equal values with the very strides of `tensor`, gaps included."""
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel() == 0:
        return Parameter(tensor.detach().clone())
    base = torch.full((extent,), 7.0, dtype=tensor.dtype)
    return Parameter(base.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach()))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(
    optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor | None]
) -> None:
    for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
        parameter.grad = (
            None
            if gradient is None
            else gradient.detach().clone(memory_format=torch.preserve_format)
        )


def random_gradients(
    parameters: Iterable[torch.Tensor], generator: torch.Generator
) -> list[torch.Tensor]:
    return [
        torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for p in parameters
    ]


def largest(tensor: torch.Tensor | None) -> float:
    """The largest finite magnitude; 0 where there is none."""
    if tensor is None:
        return 0.0
    finite = tensor.detach()[torch.isfinite(tensor)].abs()
    return float(finite.max()) if finite.numel() else 0.0


def assert_near(
    got: torch.Tensor, want: torch.Tensor, ulps: float, what: str = "", terms: float = 0.0
) -> None:
    """Every element within `ulps` roundings of the largest one; NaN and infinity alike.

    `terms`: the magnitude of what was added up, where terms may have cancelled.
    """
    assert got.shape == want.shape and got.dtype == want.dtype, what
    tolerance = ulps * torch.finfo(want.dtype).eps * max(largest(want), terms)
    torch.testing.assert_close(
        got, want, rtol=0.0, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_same_step(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, ulps: float
) -> None:
    """Parameters, state entries and step counts of two optimizers agree."""
    pairs = zip(parameters_of(ours), parameters_of(theirs), strict=True)
    for index, (mine, reference) in enumerate(pairs):
        assert_near(mine.detach(), reference.detach(), ulps, f"parameter {index}")
        terms = max(largest(reference), largest(reference.grad))
        want = {k: v for k, v in theirs.state.get(reference, {}).items() if v is not None}
        got = ours.state.get(mine, {})
        assert set(got) == set(want), f"parameter {index}: state {set(got)}, expected {set(want)}"
        for name, value in want.items():
            squared = terms * terms if name.endswith("_sq") else terms
            assert_near(got[name], value, ulps, f"{name} of parameter {index}", squared)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def snapshot(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything a failed call must leave alone, to the bit."""
    taken: list[Any] = [
        {k: repr(v) for k, v in group.items() if k not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        taken.append(bits(parameter))
        taken.append(None if gradient is None or gradient.is_sparse else bits(gradient))
        taken.append(parameter._version)
        taken.append({k: bits(v) for k, v in optimizer.state.get(parameter, {}).items()})
    return taken


def training_digest(*, flush_denormal: bool = False) -> str:
    """Hash of parameters, state and norms of a few steps of every rule and dtype.

    Values span subnormals to large ones, sizes span tails and several threads' worth of blocks.
    `flush_denormal` holds during the steps alone: conversions of the values would obey it too.
    """
    random = np.random.default_rng(3)
    sha = hashlib.sha256()
    for rule, options in RULES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            scales = (1.0, 1e-3, 1e-4, 1e-39 if dtype != torch.float16 else 1e-6)
            tensors = [
                torch.from_numpy(random.standard_normal(size) * scale).to(dtype)
                for size, scale in zip((1, 31, 4099, 140_003), scales, strict=True)
            ]
            parameters = [Parameter(t) for t in tensors]
            optimizer = getattr(tw.optim, rule)(parameters, clip_norm=5.0, **options)
            for _ in range(2):
                for parameter, scale in zip(parameters, scales, strict=True):
                    values = random.standard_normal(parameter.numel()) * scale
                    parameter.grad = torch.from_numpy(values).to(dtype)
                torch.set_flush_denormal(flush_denormal)
                optimizer.step()
                torch.set_flush_denormal(False)
                sha.update(float(optimizer.outcome.norm).hex().encode())
            for parameter in parameters:
                sha.update(bits(parameter))
                for name in sorted(optimizer.state[parameter]):
                    sha.update(bits(optimizer.state[parameter][name]))
    return sha.hexdigest()
