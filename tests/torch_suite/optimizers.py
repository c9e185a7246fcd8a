"""Our classes as PyTorch's suite takes optimizers: an `OptimizerInfo` each, made of torch's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from skips import ERRORS, UNSUPPORTED_FLAGS, Accepted

import tradewind as tw

# Our class -> torch's whose inputs it gets: its counterpart or, where torch has none, its like.
LIKE = {
    "AdamW": "AdamW",
    "SGD": "SGD",
    "Adam": "Adam",
    "Adagrad": "Adagrad",
    "RMSprop": "RMSprop",
    "Muon": "Muon",
    "Lion": "AdamW",
    "LAMB": "AdamW",
}
# Options of an input that does not set them. The suite expects that a zero gradient changes nothing
# without weight decay, and knows by name which of torch's classes decay by default.
OPTIONS = {"LAMB": {"weight_decay": 0}}


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Those of the table that this version of Tradewind has."""
    return {name: getattr(tw.optim, name) for name in LIKE if hasattr(tw.optim, name)}


def replace_torchs() -> None:
    """Put our classes into torch's database of optimizers, and under their names in torch.optim."""
    database = import_module("torch.testing._internal.common_optimizers").optim_db
    torchs = {info.optim_cls.__name__: info for info in database}
    database[:] = [_info(ours, torchs[LIKE[name]]) for name, ours in classes().items()]
    for name, ours in classes().items():
        if hasattr(torch.optim, name):
            setattr(torch.optim, name, ours)


def _info(ours: type[torch.optim.Optimizer], torchs: Any) -> Any:
    info = copy.copy(torchs)
    info.optim_cls = ours
    info.supported_impls = tuple(f for f in torchs.supported_impls if f not in UNSUPPORTED_FLAGS)
    info.optim_error_inputs_func = _of_ours(torchs.optim_error_inputs_func, _our_errors)
    if ours.__name__ != torchs.optim_cls.__name__:
        options = set(inspect.signature(ours).parameters)
        info.supported_impls = tuple(f for f in info.supported_impls if f in options)
        info.optim_inputs_func = _of_ours(
            torchs.optim_inputs_func, lambda inputs: (i for i in inputs if options >= {*i.kwargs})
        )
        info.optim_error_inputs_func = _of_ours(
            info.optim_error_inputs_func,
            lambda errors: (e for e in errors if options >= {*e.optimizer_error_input.kwargs}),
        )
    usual = OPTIONS.get(ours.__name__, {})
    info.optim_inputs_func = _of_ours(
        info.optim_inputs_func, lambda inputs: (_with_options(i, usual) for i in inputs)
    )
    return info


def _with_options(given: Any, usual: dict[str, Any]) -> Any:
    given.kwargs = {**usual, **given.kwargs}
    return given


def _of_ours(
    function: Callable[..., list[Any]], change: Callable[[list[Any]], Iterator[Any]]
) -> Callable[..., list[Any]]:
    return lambda *args, **kwargs: list(change(function(*args, **kwargs)))


def _our_errors(errors: list[Any]) -> Iterator[Any]:
    for error in errors:
        ours = ERRORS.get(error.optimizer_error_input.desc)
        if isinstance(ours, Accepted):
            continue
        if ours is not None:
            error.error_regex = ours.message
            error.error_type = ours.instead or error.error_type
        yield error
