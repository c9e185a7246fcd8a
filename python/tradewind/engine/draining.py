"""Updates that are behind reach the parameters before somebody asks for all of them at once: for
`state_dict()` torch has a hook, for `named_parameters()` and what calls it this module wraps it."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any, Protocol

import torch


class Settles(Protocol):
    def settle(self) -> None:
        """Return once every update reached the parameters."""


# Models whose parameters may be behind: who asks for all parameters at once gets them up to date.
_lazy_models: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Settles]] = (
    weakref.WeakKeyDictionary()
)
_patched = False


def _drain(model: torch.nn.Module) -> None:
    reference = _lazy_models.get(model)
    sharing = reference() if reference is not None else None
    if sharing is not None:
        sharing.settle()


def drain_before_state(model: torch.nn.Module, _prefix: str, _keep_vars: bool) -> None:
    _drain(model)


def drain_on_parameters(model: torch.nn.Module, sharing: Settles) -> None:
    """`model.parameters()` and the like settle first: torch has no hook for them."""
    global _patched
    _lazy_models[model] = weakref.ref(sharing)
    if _patched:
        return
    _patched = True
    original = torch.nn.Module.named_parameters

    @wraps(original)
    def settle_first(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _lazy_models:
            _drain(self)
        return original(self, *args, **kwargs)

    torch.nn.Module.named_parameters = settle_first  # type: ignore[method-assign]


def forget(model: torch.nn.Module) -> None:
    """Nothing of this model is behind any more."""
    _lazy_models.pop(model, None)
