"""What the Engine's `precision=` means: which dtype parameters and forward have, and what is kept
in float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from tradewind.optim.recipe import Selector, matches

Named = list[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True)
class Precision:
    """`parameters`: the 16-bit dtype that parameters take; `autocast`: that of forward over float32
    ones; None: neither."""

    name: str
    parameters: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @property
    def forward_dtype(self) -> torch.dtype | None:
        return self.parameters or self.autocast

    @property
    def scales_loss(self) -> bool:
        return self.forward_dtype is torch.float16


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32"),
        Precision("amp-bf16", autocast=torch.bfloat16),
        Precision("amp-fp16", autocast=torch.float16),
        Precision("bf16", parameters=torch.bfloat16),
        Precision("fp16", parameters=torch.float16),
    )
}


def check_dtypes(named: Named, precision: Precision) -> None:
    """Raise ValueError for a parameter whose dtype does not go with the precision."""
    for name, parameter in named:
        is_16_bit = parameter.dtype in (torch.float16, torch.bfloat16)
        if not is_16_bit or parameter.dtype == precision.parameters:
            continue
        raise ValueError(
            f"parameter {name!r}: precision={precision.name!r} expects float32 parameters, got "
            f"{parameter.dtype}; call model.float() first"
        )


def kept_in_float32(
    model: torch.nn.Module, named: Named, keep: Selector | None
) -> set[torch.nn.Parameter]:
    """The parameters that stay as they are: batch norm's, whose running statistics do, and those
    that `keep` selects. Raises ValueError for a selector that selects none."""
    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    kept = {parameter for norm in norms for parameter in norm.parameters(recurse=False)}
    if keep is None or keep in ([], ()):
        return kept
    chosen = {parameter for name, parameter in named if matches(keep, name, parameter)}
    if not chosen:
        raise ValueError(
            f"keep_fp32: {keep!r} matches no parameter; check it against model.named_parameters()"
        )
    return kept | chosen


class Conversion:
    """Parameters turned to 16 bits, with the values they had: `undo()` puts those back."""

    def __init__(self, named: Named, dtype: torch.dtype, kept: set[torch.nn.Parameter]) -> None:
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}
        for _, parameter in named:
            if parameter.is_floating_point() and parameter not in kept:
                self._before[parameter] = parameter.data
        for parameter, values in self._before.items():
            parameter.data = values.to(dtype)

    def originals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> its values before, in float32."""
        return {parameter: values.float() for parameter, values in self._before.items()}

    def undo(self) -> None:
        for parameter, values in self._before.items():
            parameter.data = values


def run_kept_in_float32(
    model: torch.nn.Module, kept: set[torch.nn.Parameter], dtype: torch.dtype
) -> list[RemovableHandle]:
    """Hooks under which modules that own kept parameters take and compute in float32 and give
    `dtype`. Batch norm needs none: it takes 16-bit input beside float32 parameters."""
    handles: list[RemovableHandle] = []
    for module in model.modules():
        own = set(module.parameters(recurse=False))
        if isinstance(module, _NormBase) or not own & kept:
            continue
        handles.append(module.register_forward_pre_hook(_widen_inputs, with_kwargs=True))
        handles.append(
            module.register_forward_hook(lambda _module, _inputs, out: cast_floats(out, dtype))
        )
    return handles


def _widen_inputs(
    _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)


def run_forward(
    model: torch.nn.Module,
    precision: Precision,
    device: torch.device,
    args: Any,
    kwargs: Any,
    *,
    caches: bool,
) -> Any:
    """The model's outputs, computed in the precision; 16-bit ones in float32. `caches`: whether
    autocast may keep the weights that it has cast."""
    if precision.forward_dtype is None:
        return model(*args, **kwargs)
    if precision.autocast is not None:
        with torch.autocast(device.type, dtype=precision.autocast, cache_enabled=caches):
            outputs = model(*args, **kwargs)
    else:
        args, kwargs = cast_floats((args, kwargs), precision.forward_dtype)
        outputs = model(*args, **kwargs)
    return cast_floats(outputs, torch.float32, only=[precision.forward_dtype])


def cast_floats(tree: Any, dtype: torch.dtype, only: Iterable[torch.dtype] | None = None) -> Any:
    """`tree` with its floating-point tensors (those of the dtypes `only`) in `dtype`."""
    chosen = None if only is None else set(only)

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.to(dtype) if chosen is None or value.dtype in chosen else value

    return tree_map(cast, tree)
