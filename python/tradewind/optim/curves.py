"""Curves: the factor of a base value after so many steps. Host arithmetic, for `schedules`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tradewind.optim.fused import check_range

Decay = Literal["cosine", "linear", "1-sqrt"]
# How much of the way down is done, given how much of its time has passed.
_DONE: dict[str, Callable[[float], float]] = {
    "cosine": lambda part: (1.0 - math.cos(math.pi * part)) / 2.0,
    "linear": lambda part: part,
    "1-sqrt": math.sqrt,
}


def check_count(name: str, value: Any, low: int, high: int | None, advice: str) -> int:
    """`value` as an int. Raises ValueError unless it is a whole number from `low` to `high`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = low - 1
    if isinstance(value, bool) or count < low or (high is not None and count > high):
        expected = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {expected}, got {value!r}; {advice}")
    return count


def _part(steps: int, of: int) -> float:
    return min(max(steps / of, 0.0), 1.0) if of else 1.0


def _blend(start: float, end: float, part: float) -> float:
    # Unlike start + part * (end - start), this is exact at both ends.
    return start * (1.0 - part) + end * part


@dataclass(frozen=True)
class Curve:
    """Factor after `step` steps: a linear ramp from `warmup_from` to 1 within `warmup_steps`, then
    1, then down to `final_fraction` within the last `decay_steps` of `total_steps`; it stays there.

    Raises ValueError for counts that do not fit into each other and factors that are not finite
    numbers >= 0.
    """

    decay: Decay
    warmup_steps: int
    total_steps: int
    decay_steps: int | None  # None: all that the warm-up leaves
    warmup_from: float
    final_fraction: float

    def __post_init__(self) -> None:
        if self.decay not in _DONE:
            raise ValueError(f"decay: expected one of {', '.join(_DONE)}, got {self.decay!r}")
        advice = "count optimizer steps, for instance epochs * len(loader)"
        total = check_count("total_steps", self.total_steps, 1, None, advice)
        advice = "the warm-up must end before total_steps"
        warmup = check_count("warmup_steps", self.warmup_steps, 0, total - 1, advice)
        advice = "warm-up and decay must fit into total_steps"
        decay = total - warmup if self.decay_steps is None else self.decay_steps
        decay = check_count("decay_steps", decay, 1, total - warmup, advice)
        for name in ("warmup_from", "final_fraction"):
            check_range(name, getattr(self, name), low=0.0, below=math.inf)
            object.__setattr__(self, name, float(getattr(self, name)))
        for name, count in zip(_COUNTS, (warmup, total, decay), strict=True):
            object.__setattr__(self, name, count)

    def __call__(self, step: int) -> float:
        assert self.decay_steps is not None
        up = _part(step, self.warmup_steps)
        down = _part(step - (self.total_steps - self.decay_steps), self.decay_steps)
        return _blend(self.warmup_from, 1.0, up) * _blend(
            1.0, self.final_fraction, _DONE[self.decay](down)
        )


_COUNTS = ("warmup_steps", "total_steps", "decay_steps")
