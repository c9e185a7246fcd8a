"""What `tw.Engine(...)` accepts: every option is checked here, before anything is touched."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch

from tradewind.engine.loss_scale import LossScale
from tradewind.engine.precision import PRECISIONS, Precision
from tradewind.optim.fused import FusedOptimizer, Masters, StateDtype, check_range
from tradewind.optim.recipe import Recipe

# Options of the design whose engines are not in this version, with the value that means "off".
_NOT_BUILT: dict[str, Any] = {
    "watch": None,
}
_UPDATES = ("after-backward", "in-backward")


@dataclass(frozen=True)
class StepOptions:
    """How the Engine steps, checked."""

    precision: Precision
    clip_norm: float | None
    accumulate: int
    masters: Masters | None
    state_dtype: StateDtype | None
    loss_scale: LossScale | None
    update: str
    graph: bool

    @property
    def updates_in_backward(self) -> bool:
        return self.update == "in-backward"

    @property
    def sums_gradients(self) -> bool:
        """Whether 16-bit gradients of several microbatches meet, which float32 sums take."""
        return self.precision.parameters is not None and self.accumulate > 1


def check_built(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _NOT_BUILT:
            raise TypeError(f"Engine got an unknown option {name!r}")
        if value != _NOT_BUILT[name]:
            raise NotImplementedError(f"Engine({name}={value!r}) is not built yet")


def step_options(
    *,
    precision: str,
    clip_norm: float | None,
    accumulate: int,
    masters: str | None,
    state_dtype: str | None,
    loss_scale: LossScale | None,
    update: str,
    graph: bool,
) -> StepOptions:
    """The options, checked one by one and together. Raises ValueError or TypeError by name."""
    _check_choice("precision", precision, tuple(PRECISIONS))
    _check_choice("update", update, _UPDATES)
    chosen = PRECISIONS[precision]
    if clip_norm is not None:
        check_range("clip_norm", clip_norm, low=0.0)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected a whole number of at least 1, got {accumulate!r}")
    if state_dtype is not None:
        _check_choice("state_dtype", state_dtype, get_args(StateDtype))
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(f"loss_scale: expected a tw.LossScale, got {type(loss_scale).__name__}")
    if loss_scale is not None and not chosen.scales_loss:
        raise ValueError(
            f"loss_scale: precision={precision!r} needs none; it is for 'fp16' and 'amp-fp16'"
        )
    if chosen.scales_loss and loss_scale is None:
        loss_scale = LossScale()
    checked = StepOptions(
        chosen,
        clip_norm,
        accumulate,
        _masters(masters, chosen),
        cast("StateDtype | None", state_dtype),
        loss_scale,
        update,
        graph,
    )
    if not isinstance(graph, bool):
        raise TypeError(f"graph: expected True or False, got {graph!r}")
    if checked.updates_in_backward:
        _check_in_backward(checked)
    return checked


def _masters(given: str | None, precision: Precision) -> Masters | None:
    if given is None:
        return "fp32" if precision.parameters is not None else None
    _check_choice("masters", given, get_args(Masters))
    if precision.parameters is None:
        raise ValueError(
            f"masters: precision={precision.name!r} keeps float32 parameters, which need no "
            "masters; leave it out, or use precision='bf16'"
        )
    if given == "split" and precision.parameters is torch.float16:
        raise ValueError(
            "masters: 'split' is for precision='bf16' (16 more bits make a float16 no float32); "
            "use masters='fp32'"
        )
    return cast("Masters", given)


def _check_in_backward(options: StepOptions) -> None:
    """An update before backward has ended knows neither the norm nor later microbatches."""
    excluded = {
        "clip_norm": options.clip_norm is not None,
        "accumulate": options.accumulate > 1,
        "graph=True": options.graph,
        f"precision={options.precision.name!r}": options.precision.scales_loss,
    }
    found = [name for name, is_set in excluded.items() if is_set]
    if found:
        raise ValueError(
            f"update='in-backward' applies each gradient as soon as it exists, which excludes "
            f"{', '.join(found)}: clipping needs the norm of all gradients, accumulation those of "
            "later microbatches, a loss scale to know that none overflows, a graph a backward of "
            "its own; leave these out, or use update='after-backward'"
        )


def _check_choice(name: str, given: Any, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {given!r}")


def check_shareable(options: StepOptions) -> None:
    """Raise ValueError for options that work on one rank alone."""
    if options.updates_in_backward:
        raise ValueError(
            "update='in-backward' steps each parameter before other ranks' gradients are there; "
            "leave it out, or leave out share="
        )
    if options.graph:
        raise NotImplementedError(
            "graph=True with share= is not built yet; leave one of the two out"
        )


def make_optimizer(
    optimizer: Recipe | FusedOptimizer,
    named: list[tuple[str, torch.nn.Parameter]],
    options: StepOptions,
    model: torch.nn.Module,
) -> FusedOptimizer:
    """The optimizer, checked against the Engine's options; `adopt_options` then sets them."""
    if isinstance(optimizer, Recipe):
        trainable = [(name, p) for name, p in named if p.is_floating_point()]
        if not trainable:
            raise ValueError("model: expected at least one floating-point parameter, got none")
        built = optimizer.build(trainable, model=model)
        _check_agreement(built, options)
        return built
    if not isinstance(optimizer, FusedOptimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer: expected a recipe such as tw.AdamW(lr=1e-3) or a tw.optim optimizer, got "
            f"{name}" + (" of torch.optim" if isinstance(optimizer, torch.optim.Optimizer) else "")
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in held for _, parameter in named):
        raise ValueError("optimizer: holds none of this model's parameters; make it for this model")
    _check_agreement(optimizer, options)
    return optimizer


def _check_agreement(optimizer: FusedOptimizer, options: StepOptions) -> None:
    for name in ("clip_norm", "masters", "state_dtype"):
        has, given = getattr(optimizer, name), getattr(options, name)
        if has is not None and given is not None and has != given:
            raise ValueError(
                f"{name}: the optimizer has {has!r}, the Engine was given {given!r}; set one"
            )
    if options.graph and not optimizer.steps_on_device:
        raise ValueError(
            "graph=True: CUDA graphs need the model on a GPU, but its parameters are on the CPU; "
            "leave it out, or call model.cuda() first"
        )
    if options.updates_in_backward and optimizer.clip_norm is not None:
        raise ValueError(
            "update='in-backward' excludes the optimizer's clip_norm, which needs the norm of all "
            "gradients; leave it out, or use update='after-backward'"
        )


def adopt_options(optimizer: FusedOptimizer, options: StepOptions) -> None:
    """Set the options on the optimizer, whose state is converted where its storage changes."""
    if options.clip_norm is not None:
        optimizer.clip_norm = options.clip_norm
    optimizer.store(
        masters=options.masters or optimizer.masters,
        state_dtype=options.state_dtype or optimizer.state_dtype,
    )


def describe(
    optimizer: FusedOptimizer, options: StepOptions, model: torch.nn.Module
) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        described = {key: group[key] for key in group if key not in ("params", "param_names")}
        with contextlib.suppress(TypeError, ValueError):
            described["lr"] = float(group["lr"])
        described["num_parameters"] = len(group["params"])
        groups.append(described)
    return {
        "model": type(model).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
        "precision": options.precision.name,
        "clip_norm": optimizer.clip_norm if options.clip_norm is None else options.clip_norm,
        "accumulate": options.accumulate,
        "masters": options.masters or optimizer.masters,
        "state_dtype": options.state_dtype or optimizer.state_dtype,
        "update": options.update,
        "graph": options.graph,
    }
