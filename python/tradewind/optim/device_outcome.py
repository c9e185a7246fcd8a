"""What a step on a device did, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tradewind._core import native
from tradewind.optim.fused import Outcome


class DeviceOutcome(Outcome):
    """`Outcome` of a step that the device may not have taken yet.

    Its numbers wait for the device when they are first read; `is_ready()` tells whether they would,
    and `found_inf()` never does. `num_nonfinite` counts
    parameters with a NaN or infinite gradient, not elements. Of a step that a graph has captured,
    they are those of the last replay that is over: synchronize before reading.
    """

    def __init__(
        self,
        readings: Sequence[native.StepReading],
        name_of: Callable[[Sequence[int]], str],
        *,
        vetoed: Callable[[], torch.Tensor],
        measured: bool,
        gradient_multiplier: float,
    ) -> None:
        self._readings = readings  # one a device
        self._name_of = name_of
        self._vetoed = vetoed
        self._measured = measured
        self._multiplier = gradient_multiplier
        self._numbers: tuple[float, float, bool, int, float] | None = None
        self._name = ""

    def is_ready(self) -> bool:
        """Whether reading the numbers would not wait."""
        return self._numbers is not None or all(r.is_ready() for r in self._readings)

    def found_inf(self, device: torch.device) -> torch.Tensor:
        """As `Outcome.found_inf`. Call it before the next step."""
        return self._vetoed().to(device, torch.float32, non_blocking=True)

    def _read(self) -> tuple[float, float, bool, int, float]:
        if self._numbers is not None:
            return self._numbers
        if not self._readings:  # nothing was asked of the device
            return 0.0, 1.0, True, 0, 1.0
        outcomes = [reading.outcome() for reading in self._readings]
        norm, clip_factor, applied, num_nonfinite, _, loss_scale = outcomes[0]
        num_nonfinite = num_nonfinite if self._measured else 0
        self._name = self._name_of([outcome[4] for outcome in outcomes]) if num_nonfinite else ""
        numbers = (norm, clip_factor, applied, num_nonfinite, loss_scale)
        if not any(reading.is_captured for reading in self._readings):
            self._numbers = numbers
            self._readings = ()  # their memory may be used again
        return numbers

    @property
    def norm(self) -> float | None:  # type: ignore[override]
        return self._read()[0] if self._measured else None

    @property
    def clip_factor(self) -> float:  # type: ignore[override]
        return self._read()[1]

    @property
    def applied(self) -> bool:  # type: ignore[override]
        return self._read()[2]

    @property
    def num_nonfinite(self) -> int:  # type: ignore[override]
        return self._read()[3]

    @property
    def gradient_multiplier(self) -> float:  # type: ignore[override]
        return self._multiplier / self._read()[4]

    @property
    def first_nonfinite_name(self) -> str:  # type: ignore[override]
        self._read()
        return self._name
