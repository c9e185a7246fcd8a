"""What a step on a device did, read when somebody asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

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
        # Where ranks share gradients: whose were not finite before they were summed.
        self.find_nonfinite: Callable[[], Sequence[native.NonFiniteGradient]] | None = None

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
    def nonfinite(self) -> tuple[native.NonFiniteGradient, ...]:  # type: ignore[override]
        if self.find_nonfinite is None or self.applied:
            return ()
        return tuple(self.find_nonfinite())

    @property
    def gradient_multiplier(self) -> float:  # type: ignore[override]
        return self._multiplier / self._read()[4]

    @property
    def first_nonfinite_name(self) -> str:  # type: ignore[override]
        self._read()
        return self._name


class JoinedReadings:
    """The numbers of several steps of one device that make up one update."""

    is_captured = False

    def __init__(self, readings: Sequence[native.StepReading]) -> None:
        self.readings = readings

    def is_ready(self) -> bool:
        return all(reading.is_ready() for reading in self.readings)

    def statistics(self) -> dict[str, list[float]]:
        """Columns in order of the parameters; waits for the device."""
        columns: dict[str, list[float]] = {}
        for reading in self.readings:
            for name, values in reading.statistics().items():
                columns.setdefault(name, []).extend(values)
        order = sorted(range(len(columns.get("parameter_idx", []))), key=_at(columns))
        return {name: [values[i] for i in order] for name, values in columns.items()}


def _at(columns: dict[str, list[float]]) -> Callable[[int], float]:
    return lambda i: columns["parameter_idx"][i]


class DeviceBackwardOutcome(Outcome):
    """`Outcome` of an update inside backward; read when somebody asks, as `DeviceOutcome` is.

    `num_withheld` counts the parameters of the steps that a NaN or infinite gradient has vetoed.
    """

    def __init__(
        self,
        joined: Sequence[JoinedReadings],
        global_index: Callable[[int, int], int],
        names: Sequence[str],
    ) -> None:
        self._joined = joined
        self._global_index = global_index
        self._names = names
        self._numbers: tuple[float, int, int, int, str] | None = None

    def is_ready(self) -> bool:
        return self._numbers is not None or all(each.is_ready() for each in self._joined)

    def _read(self) -> tuple[float, int, int, int, str]:
        """(norm, updated, withheld, non-finite, name of the first non-finite)"""
        if self._numbers is not None:
            return self._numbers
        updated, withheld, num_nonfinite = 0, 0, 0
        squares: dict[int, float] = {}
        bad: list[int] = []
        for number, joined in enumerate(self._joined):
            for reading in joined.readings:
                _, _, applied, nonfinite, first, _ = reading.outcome()
                columns = reading.statistics()
                locals_ = [int(local) for local in columns["parameter_idx"]]
                updated += len(locals_) if applied else 0
                withheld += 0 if applied else len(locals_)
                num_nonfinite += nonfinite
                bad += [self._global_index(number, first)] if first >= 0 else []
                for local, value in zip(locals_, columns["gradient_squares"], strict=True):
                    squares[self._global_index(number, local)] = value
        norm = (
            math.nan if withheld else math.sqrt(_sum_in_lanes(squares[i] for i in sorted(squares)))
        )
        name = self._names[min(bad)] if bad else ""
        self._numbers = (norm, updated, withheld, num_nonfinite, name)
        return self._numbers

    @property
    def norm(self) -> float:  # type: ignore[override]
        return self._read()[0]

    @property
    def applied(self) -> bool:  # type: ignore[override]
        return self._read()[1] > 0 or self._read()[2] == 0

    @property
    def num_withheld(self) -> int:  # type: ignore[override]
        return self._read()[2]

    @property
    def num_hot(self) -> int:  # type: ignore[override]
        return self._read()[1]

    @property
    def num_nonfinite(self) -> int:  # type: ignore[override]
        return self._read()[3]

    @property
    def first_nonfinite_name(self) -> str:  # type: ignore[override]
        return self._read()[4]


def _sum_in_lanes(values: Iterable[float]) -> float:
    """As csrc/step/lanes.h adds, so that the norm has the CPU's bits."""
    lanes = [0.0] * 32
    for index, value in enumerate(values):
        lanes[index % 32] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]
