"""A logged series made ready to draw: gaps, thinning that keeps every spike, smoothing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tradewind.track import Series

Floats = NDArray[np.float64]
_NUM_BUCKETS = 1_000
_MIN_SMOOTHED_POINTS = 30
_SMOOTHING_SHARE = 50  # the window is one fiftieth of the curve


@dataclass(frozen=True)
class Curve:
    """One value over steps; `values` are NaN where a non-finite number was logged."""

    name: str
    steps: Floats
    values: Floats
    non_finite_steps: tuple[int, ...]
    last: float | None

    @property
    def finite(self) -> Floats:
        """The finite values, in order of steps."""
        return self.values[np.isfinite(self.values)]

    @property
    def spans_decades(self) -> bool:
        """Whether a logarithmic axis shows it better: positive, over more than two decades. Not
        for the learning rate, whose schedule is known by its shape on a linear axis."""
        finite = self.finite
        return self.name != "lr" and bool(
            finite.size and finite.min() > 0 and finite.max() > 100 * finite.min()
        )


def curve_of(series: Series) -> Curve:
    """The curve of a series; infinities become gaps as NaN does."""
    finite = np.isfinite(series.values)
    return Curve(
        series.name,
        series.steps.astype(np.float64),
        np.where(finite, series.values, np.nan),
        tuple(int(step) for step in series.steps[~finite]),
        float(series.values[-1]) if len(series) else None,
    )


def thinned(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """At most two points a bucket, its lowest and its highest in their order: no spike is lost. A
    bucket without a finite value stays a gap."""
    if len(steps) <= 2 * _NUM_BUCKETS:
        return steps, values
    edges = np.linspace(0, len(steps), _NUM_BUCKETS + 1).astype(np.int64)
    is_gap = np.isnan(values)
    low, high = np.where(is_gap, np.inf, values), np.where(is_gap, -np.inf, values)
    chosen: list[int] = []
    for start, end in pairwise(edges.tolist()):
        pair = {start + int(low[start:end].argmin()), start + int(high[start:end].argmax())}
        chosen += sorted(pair)
    return steps[chosen], values[chosen]


def smoothed(values: Floats) -> Floats | None:
    """The centred moving average of the finite values, a gap where `values` has one; None for a
    curve that is too short to need it."""
    if np.isfinite(values).sum() < _MIN_SMOOTHED_POINTS:
        return None
    half = max(1, len(values) // _SMOOTHING_SHARE // 2)
    finite = np.isfinite(values)
    # Running sums of values less their mean: a common offset would cost digits.
    centre = float(values[finite].mean())
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values - centre, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    window = np.maximum(counts[last] - counts[first], 1)
    return np.where(finite, (sums[last] - sums[first]) / window + centre, np.nan)


def isolated(values: Floats) -> NDArray[np.bool_]:
    """Finite values between gaps, which a line would not show."""
    finite = np.concatenate([[False], np.isfinite(values), [False]])
    result: NDArray[np.bool_] = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    return result
