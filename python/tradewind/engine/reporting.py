"""What the Engine says of an update in words, and the numbers it makes of several microbatches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from tradewind.engine.options import StepOptions
from tradewind.engine.step_result import StepResult


def report_veto(
    result: StepResult, num_vetoed: int, device: torch.device, options: StepOptions
) -> None:
    """Warn of the 1st, 2nd, 4th, 8th ... vetoed update."""
    if num_vetoed & (num_vetoed - 1):
        return
    what = "its update" if options.updates_in_backward else "the update"
    unit = "elements" if device.type == "cpu" else "gradients"
    warnings.warn(
        f"step {result.step}: {_nonfinite_text(result)} ({result.num_nonfinite} NaN or infinite "
        f"{unit} in all); {what} was skipped and nothing changed ({num_vetoed} skipped so far)",
        RuntimeWarning,
        stacklevel=6,
    )


def mean_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack([x.reshape(()) for x in losses]).mean()


def _nonfinite_text(result: StepResult) -> str:
    found = result.nonfinite
    if not found:
        return f"the gradient of {result.first_nonfinite!r} is not finite"
    whose = [f"rank {n.rank}'s of {n.parameter_name!r} in microbatch {n.microbatch}" for n in found]
    return f"the gradient is not finite: {', '.join(whose[:8])}{' ...' * (len(whose) > 8)}"
