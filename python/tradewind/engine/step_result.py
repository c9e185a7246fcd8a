"""What one call of `Engine.step` did. Numbers that live on a device are read when asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tradewind.optim.fused import Outcome


class StepResult:
    """The outcome of one microbatch, and of the update if this microbatch completed one.

    Attributes:
        step: number of the update, counting from 1: the one done, or the one being accumulated.
        applied: whether parameters were updated.
        vetoed: whether an update was due but not applied, because a gradient was not finite; with
            update="in-backward", whether that was so for some parameter.
        first_nonfinite: name of the first parameter (in the optimizer's order) with a NaN or
            infinite gradient; empty if there is none.
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
        self.applied = outcome is not None and outcome.applied
        self.vetoed = outcome is not None and (not outcome.applied or outcome.num_withheld > 0)
        self.first_nonfinite = outcome.first_nonfinite_name if outcome else ""
        self.num_nonfinite = outcome.num_nonfinite if outcome else 0
        self.clip_factor = outcome.clip_factor if outcome else 1.0
        self.num_hot = outcome.num_hot if outcome else 0

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
