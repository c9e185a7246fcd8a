"""Recipes: an optimizer's options without its parameters, for `tw.Engine(model, tw.AdamW(lr=...))`.
The Engine builds the optimizer once the parameters live in their arena."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from tradewind.optim.adagrad import Adagrad as _Adagrad
from tradewind.optim.adam import Adam as _Adam
from tradewind.optim.adamw import AdamW as _AdamW
from tradewind.optim.fused import FusedOptimizer
from tradewind.optim.lamb import LAMB as _LAMB
from tradewind.optim.lion import Lion as _Lion
from tradewind.optim.rmsprop import RMSprop as _RMSprop
from tradewind.optim.sgd import SGD as _SGD

Selector = str | Sequence[str] | Callable[[str, torch.nn.Parameter], bool]


class Recipe:
    """Options of a `tw.optim` optimizer, waiting for the parameters.

    Args:
        groups: param groups that differ from the rest, each a dict with ``params`` and the options
            that differ. ``params`` is a pattern or a list of patterns of parameter names as
            `fnmatch` has them (``"*.bias"``), or a function ``(name, parameter) -> bool``. The
            first group that matches a parameter takes it; what none matches forms the first
            param group.
        **options: what the optimizer's constructor takes, but for the parameters.

    Raises:
        TypeError: an option the optimizer does not have, or parameters in the place of options.
        ValueError: an option out of range.
    """

    optimizer_class: ClassVar[type[FusedOptimizer]]

    def __init__(
        self, *args: Any, groups: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> None:
        name = type(self).__name__
        if args:
            raise TypeError(
                f"tw.{name} is a recipe and takes options by name, got {type(args[0]).__name__}; "
                f"use tw.optim.{name}(parameters, ...), or leave out the parameters: "
                f"tw.{name}(lr=...)"
            )
        self.options = dict(options)
        self.groups = [dict(group) for group in groups]
        self._check_names(self.options, "options")
        # Built on a scrap tensor, so that a bad value is told here and not when training starts.
        self.optimizer_class([torch.zeros(1, 1)], **self.options)
        for index, group in enumerate(self.groups):
            if "params" not in group:
                raise ValueError(
                    f"groups[{index}]: expected 'params' (name patterns or a function), got only "
                    f"{sorted(group)}"
                )
            changed = {key: value for key, value in group.items() if key != "params"}
            self._check_names(changed, f"groups[{index}]")
            scrap = {**changed, "params": [torch.zeros(1, 1)]}
            self.optimizer_class([scrap], **self.options)

    def _check_names(self, options: Mapping[str, Any], place: str) -> None:
        known = [p for p in inspect.signature(self.optimizer_class).parameters if p != "params"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(
                f"tw.{type(self).__name__} {place}: unknown {', '.join(unknown)}; "
                f"expected some of {', '.join(known)}"
            )

    def build(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        clip_norm: float | None = None,
        model: torch.nn.Module | None = None,
    ) -> FusedOptimizer:
        """The optimizer over these parameters, which are `model`'s where that is given.

        Raises ValueError for a group that takes no parameter.
        """
        options = dict(self.options)
        if clip_norm is not None:
            options["clip_norm"] = clip_norm
        return self.optimizer_class(self.param_groups(named_parameters), **options)

    def param_groups(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """The param groups over these parameters. Raises ValueError for one that takes none."""
        members: list[list[tuple[str, torch.nn.Parameter]]] = [
            [] for _ in range(1 + len(self.groups))
        ]
        for name, parameter in named_parameters:
            matching = (
                index
                for index, group in enumerate(self.groups, start=1)
                if matches(group["params"], name, parameter)
            )
            members[next(matching, 0)].append((name, parameter))
        for index, group in enumerate(self.groups, start=1):
            if not members[index]:
                raise ValueError(
                    f"groups[{index - 1}]: params={group['params']!r} matches no parameter that an "
                    "earlier group has not taken; check it against model.named_parameters()"
                )
        return [
            {**({} if index == 0 else self.groups[index - 1]), "params": members[index]}
            for index in range(len(members))
            if members[index]
        ]

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        if self.groups:
            options.append(f"groups={self.groups!r}")
        return f"tw.{type(self).__name__}({', '.join(options)})"


def matches(selector: Selector, name: str, parameter: torch.nn.Parameter) -> bool:
    if callable(selector):
        return bool(selector(name, parameter))
    patterns = [selector] if isinstance(selector, str) else selector
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class AdamW(Recipe):
    """`tw.optim.AdamW` without its parameters: ``tw.AdamW(lr=1e-3, weight_decay=0.1)``."""

    optimizer_class = _AdamW


class SGD(Recipe):
    """`tw.optim.SGD` without its parameters: ``tw.SGD(lr=0.1, momentum=0.9)``."""

    optimizer_class = _SGD


class Adam(Recipe):
    """`tw.optim.Adam` without its parameters: ``tw.Adam(lr=1e-3)``."""

    optimizer_class = _Adam


class Lion(Recipe):
    """`tw.optim.Lion` without its parameters: ``tw.Lion(lr=1e-4, weight_decay=0.1)``."""

    optimizer_class = _Lion


class LAMB(Recipe):
    """`tw.optim.LAMB` without its parameters: ``tw.LAMB(lr=1e-3)``."""

    optimizer_class = _LAMB


class Adagrad(Recipe):
    """`tw.optim.Adagrad` without its parameters: ``tw.Adagrad(lr=1e-2)``."""

    optimizer_class = _Adagrad


class RMSprop(Recipe):
    """`tw.optim.RMSprop` without its parameters: ``tw.RMSprop(lr=1e-2)``."""

    optimizer_class = _RMSprop
