"""What a step on a device did, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tradewind._core import native
from tradewind.optim.fused import Outcome


class DeviceOutcome(Outcome):
    """`Outcome` of a step that the device may not have taken yet.

    `norm`, `clip_factor`, `applied`, `num_nonfinite` and `first_nonfinite_name` wait for the device
    when they are first read; `is_ready()` tells whether they would. `num_nonfinite` counts
    parameters with a NaN or infinite gradient, not elements. Of a step that a graph has captured,
    they are those of the last replay that is over: synchronize before reading.
    """

    def __init__(
        self,
        readings: Sequence[native.StepReading],
        name_of: Callable[[Sequence[int]], str],
        *,
        measured: bool,
    ) -> None:
        self._readings = readings  # one a device
        self._name_of = name_of
        self._measured = measured
        self._numbers: tuple[float, float, bool, int] | None = None
        self._name = ""

    def is_ready(self) -> bool:
        """Whether reading the numbers would not wait."""
        return self._numbers is not None or all(r.is_ready() for r in self._readings)

    def _read(self) -> tuple[float, float, bool, int]:
        if self._numbers is None:
            if not self._readings:
                self._numbers = (0.0, 1.0, True, 0)
                return self._numbers
            outcomes = [reading.outcome() for reading in self._readings]
            norm, clip_factor, applied, num_nonfinite, _ = outcomes[0]
            self._numbers = (norm, clip_factor, applied, num_nonfinite if self._measured else 0)
            if self._numbers[3]:
                self._name = self._name_of([outcome[4] for outcome in outcomes])
            if any(reading.is_captured for reading in self._readings):
                numbers, self._numbers = self._numbers, None
                return numbers
            self._readings = ()  # their memory may be used again
        return self._numbers

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
    def first_nonfinite_name(self) -> str:  # type: ignore[override]
        self._read()
        return self._name
