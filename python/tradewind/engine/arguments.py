"""What the Engine's methods are given in the loop, checked before anything happens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def check_loss(loss: Any) -> None:
    """Raise TypeError or ValueError unless backward can run from `loss`."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss: expected a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"loss: expected a scalar, got shape {tuple(loss.shape)}; take .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss: has no graph, so nothing can be learnt from it; was it computed under "
            "torch.no_grad(), from .detach() or .item(), or are all parameters frozen?"
        )


def check_foreign_backward(
    parameters: Iterable[torch.Tensor], *, accumulates: bool, precision: str | None
) -> None:
    """Raise RuntimeError unless gradients are there that `loss.backward()` has made. `precision`:
    its name where it scales the loss."""
    if accumulates or all(parameter.grad is None for parameter in parameters):
        raise RuntimeError(
            "step: expected a backward before it, found none; call engine.step(loss), or "
            "engine.backward(loss) before engine.step()"
        )
    if precision is not None:
        raise RuntimeError(
            f"step: precision={precision!r} scales the loss, which loss.backward() does not; call "
            "engine.step(loss), or engine.backward(loss) before engine.step()"
        )


def check_batches(loader: Any, epochs: Any) -> None:
    """Raise TypeError or ValueError unless `loader` can be read `epochs` times."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs: expected a whole number of at least 1, got {epochs!r}")
    if not hasattr(loader, "__iter__"):
        raise TypeError(
            f"loader: expected an iterable of batches (a DataLoader, a list), got "
            f"{type(loader).__name__}"
        )
    if epochs > 1 and isinstance(loader, Iterator):
        raise TypeError(
            f"loader: a {type(loader).__name__} can be read once, but epochs={epochs}; pass "
            "something that can be iterated again, such as a DataLoader or a list"
        )


def compiled_autograd_is_on() -> bool:
    """Whether torch compiles backward graphs, which then take no hooks of C++."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(module is not None and getattr(module, "compiled_autograd_enabled", False))
