"""What one call of `Engine.step` did. Numbers that live on a device are read when asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tradewind._core import native
from tradewind.optim.fused import Outcome


class StepResult:
    """The outcome of one microbatch, and of the update if this microbatch completed one.

    On a GPU its numbers are read when somebody asks for them, which waits for the device.

    Attributes:
        step: number of the update, counting from 1: the one done, or the one being accumulated.
        applied: whether parameters were updated.
        vetoed: whether an update was due but not applied, because a gradient was not finite; with
            update="in-backward", whether that was so for some parameter.
        first_nonfinite: name of the first parameter (in the optimizer's order) with a NaN or
            infinite gradient; empty if there is none.
        nonfinite: with `share=`, for each rank whose own gradients were not finite: `rank`,
            `parameter_name` (the first one), `microbatch` (from 1) and `num_parameters`.
        num_nonfinite: number of such elements, over all parameters.
        clip_factor: what gradients were multiplied by to respect `clip_norm` (1.0: not clipped).
        num_hot: parameters whose gradient was measured during backward, while in cache.
    """

    def __init__(
        self, step: int, losses: Sequence[torch.Tensor], outcome: Outcome | None = None
    ) -> None:
        self._losses = list(losses)
        self._outcome = outcome
        self.step = step

    @property
    def applied(self) -> bool:
        return self._outcome is not None and self._outcome.applied

    @property
    def vetoed(self) -> bool:
        outcome = self._outcome
        return outcome is not None and (not outcome.applied or outcome.num_withheld > 0)

    @property
    def first_nonfinite(self) -> str:
        return self._outcome.first_nonfinite_name if self._outcome else ""

    @property
    def nonfinite(self) -> list[native.NonFiniteGradient]:
        return list(self._outcome.nonfinite) if self._outcome else []

    @property
    def num_nonfinite(self) -> int:
        return self._outcome.num_nonfinite if self._outcome else 0

    @property
    def clip_factor(self) -> float:
        return self._outcome.clip_factor if self._outcome else 1.0

    @property
    def num_hot(self) -> int:
        return self._outcome.num_hot if self._outcome else 0

    @property
    def loss(self) -> float:
        """Mean loss over the microbatches of this update so far (NaN where none was given)."""
        if not self._losses:
            return float("nan")
        return sum(float(loss) for loss in self._losses) / len(self._losses)

    @property
    def grad_norm(self) -> float:
        """2-norm of all gradients before clipping; NaN before an update is due."""
        if self._outcome is None or self._outcome.norm is None:
            return float("nan")
        return float(self._outcome.norm)

    def __repr__(self) -> str:
        state = "applied" if self.applied else "vetoed" if self.vetoed else "accumulating"
        return f"StepResult(step={self.step}, {state}, loss={self.loss:.6g})"
