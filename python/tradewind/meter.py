"""Samples per second and where the time between two updates went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepTimes:
    """One update: seconds since the one before, of which seconds waiting for input; samples."""

    step_s: float
    wait_s: float
    samples: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s if self.step_s > 0 else 0.0


class Meter:
    """Counts samples and input waits between updates. One thread; clock: `time.perf_counter`."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._wait_s = 0.0
        self._samples = 0

    def start(self) -> None:
        """Begin anew, so that what came before the loop counts for no step."""
        self._last = time.perf_counter()
        self._wait_s = 0.0
        self._samples = 0

    def batch(self, samples: int, wait_s: float) -> None:
        self._samples += samples
        self._wait_s += wait_s

    def update_done(self) -> StepTimes:
        now = time.perf_counter()
        times = StepTimes(now - self._last, self._wait_s, self._samples)
        self._last, self._wait_s, self._samples = now, 0.0, 0
        return times


def count_samples(batch: Any) -> int:
    """Extent of the first dimension of the first tensor found in a (nested) batch; 0 if none."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return 0
    return next((n for n in map(count_samples, values) if n), 0)
