"""The loss scale of float16 training: gradients are taken of a multiple of the loss, so that small
ones do not vanish in float16, and divided by it in the sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class LossScale:
    """How the loss scale moves; the rule and the defaults are `torch.amp.GradScaler`'s.

    Args:
        initial: scale of the first step.
        growth_factor: multiplies the scale after `growth_interval` good steps in a row; above 1.
        backoff_factor: multiplies it after a step with a NaN or infinite gradient, which is
            skipped; in (0, 1).
        growth_interval: good steps in a row before it grows.
        floor: where the scale would fall below this, training stops with FloatingPointError, which
            names the parameter that overflows. (DeepSpeed's ``min_loss_scale`` is 1 as well; torch
            has no floor and skips for ever.)

    Raises ValueError for a value out of range.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"LossScale({field.name}=): expected a number, got {value!r}")
        self._check("initial", 0 < self.initial < math.inf, "a positive number")
        self._check("growth_factor", self.growth_factor > 1, "a number above 1")
        self._check("backoff_factor", 0 < self.backoff_factor < 1, "a number in (0, 1)")
        is_count = isinstance(self.growth_interval, int) and self.growth_interval >= 1
        self._check("growth_interval", is_count, "a whole number of at least 1")
        self._check("floor", 0 < self.floor <= self.initial, "a positive number, at most initial")

    def _check(self, name: str, is_good: bool, expected: str) -> None:
        if not is_good:
            raise ValueError(f"LossScale({name}=): expected {expected}, got {getattr(self, name)}")


class LossScaleState:
    """A loss scale at work.

    It lies on the parameters' device, as a 0-d float32 tensor that moves without the host. The host
    follows with `value`, as the outcomes of updates arrive: reading the tensor would be a wait.
    """

    def __init__(self, options: LossScale, device: torch.device) -> None:
        self.options = options
        self.scale = torch.full((), options.initial, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.value = float(np.float32(options.initial))
        self._num_good = 0

    def update(self, overflowed: torch.Tensor) -> None:
        """Grow or back off on the device, given whether (not 0) the last step overflowed."""
        torch._amp_update_scale_(
            self.scale,
            self._growth_tracker,
            overflowed,
            self.options.growth_factor,
            self.options.backoff_factor,
            self.options.growth_interval,
        )

    def follow(self, *, overflowed: bool) -> None:
        """What `update` did on the device, on the host."""
        options = self.options
        if overflowed:
            self.value = float(np.float32(self.value * options.backoff_factor))
            self._num_good = 0
            return
        self._num_good += 1
        if self._num_good == options.growth_interval:
            with np.errstate(over="ignore"):
                grown = float(np.float32(self.value * options.growth_factor))
            self.value = grown if math.isfinite(grown) else self.value
            self._num_good = 0

    def check_floor(self, parameter_name: str, step: int) -> None:
        """Raise FloatingPointError once the scale has fallen below its floor."""
        if self.value >= self.options.floor:
            return
        raise FloatingPointError(
            f"step {step}: the loss scale fell to {self.value:g}, below its floor "
            f"{self.options.floor:g}, and the gradient of {parameter_name!r} still overflows; no "
            "update was applied. The loss may have diverged: lower lr, set clip_norm, keep that "
            "layer in float32 (keep_fp32=), or use precision='bf16', which needs no loss scale"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"scale": float(self.scale), "growth_tracker": int(self._growth_tracker)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = float(state_dict["scale"])
        self._num_good = int(state_dict["growth_tracker"])
        self.scale.fill_(self.value)
        self._growth_tracker.fill_(self._num_good)
