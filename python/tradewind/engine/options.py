"""What `tw.Engine(...)` accepts: every option is checked here, before anything is touched."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tradewind.optim.fused import FusedOptimizer, check_range
from tradewind.optim.recipe import Recipe
from tradewind.place import place

_PRECISIONS = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")
_BUILT_PRECISIONS = ("fp32", "amp-bf16")
# Options of the design whose engines are not in this version, with the value that means "off".
_NOT_BUILT: dict[str, Any] = {
    "share": None,
    "checkpoint": None,
    "watch": None,
    "resume": "auto",
    "graph": False,
    "update": "after-backward",
    "masters": None,
    "state_dtype": None,
    "keep_fp32": None,
}


def check_built(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _NOT_BUILT:
            raise TypeError(f"Engine got an unknown option {name!r}")
        if value != _NOT_BUILT[name]:
            raise NotImplementedError(f"Engine({name}={value!r}) is not built yet")


def check_options(precision: str, clip_norm: float | None, accumulate: int) -> None:
    if precision not in _PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(_PRECISIONS)}, got {precision!r}")
    if precision not in _BUILT_PRECISIONS:
        raise NotImplementedError(
            f"Engine(precision={precision!r}) is not built yet; use one of "
            f"{', '.join(_BUILT_PRECISIONS)}"
        )
    if clip_norm is not None:
        check_range("clip_norm", clip_norm, low=0.0)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected a whole number of at least 1, got {accumulate!r}")


def check_place() -> None:
    here = place()
    if here.world_size > 1:
        raise NotImplementedError(
            f"Engine over {here.world_size} processes is not built yet: each would train alone; "
            "start one process"
        )


def check_precision(named: list[tuple[str, torch.nn.Parameter]], precision: str) -> None:
    for name, parameter in named:
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"parameter {name!r}: precision={precision!r} expects float32 parameters, got "
                f"{parameter.dtype}; call model.float() first"
            )


def make_optimizer(
    optimizer: Recipe | FusedOptimizer,
    named: list[tuple[str, torch.nn.Parameter]],
    clip_norm: float | None,
) -> FusedOptimizer:
    given = (
        optimizer.options.get("clip_norm")
        if isinstance(optimizer, Recipe)
        else getattr(optimizer, "clip_norm", None)
    )
    if clip_norm is not None and given is not None and given != clip_norm:
        raise ValueError(
            f"clip_norm: the optimizer has {given}, the Engine was given {clip_norm}; set one"
        )
    if isinstance(optimizer, Recipe):
        trainable = [(name, p) for name, p in named if p.is_floating_point()]
        if not trainable:
            raise ValueError("model: expected at least one floating-point parameter, got none")
        return optimizer.build(trainable, clip_norm)
    if not isinstance(optimizer, FusedOptimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer: expected a recipe such as tw.AdamW(lr=1e-3) or a tw.optim optimizer, got "
            f"{name}" + (" of torch.optim" if isinstance(optimizer, torch.optim.Optimizer) else "")
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in held for _, parameter in named):
        raise ValueError("optimizer: holds none of this model's parameters; make it for this model")
    if clip_norm is not None:
        optimizer.clip_norm = clip_norm
    return optimizer


def describe(
    optimizer: FusedOptimizer, precision: str, accumulate: int, model: torch.nn.Module
) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        described = {key: group[key] for key in optimizer.defaults if key in group}
        with contextlib.suppress(TypeError, ValueError):
            described["lr"] = float(group["lr"])
        described["num_parameters"] = len(group["params"])
        groups.append(described)
    return {
        "model": type(model).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
        "precision": precision,
        "clip_norm": optimizer.clip_norm,
        "accumulate": accumulate,
    }
