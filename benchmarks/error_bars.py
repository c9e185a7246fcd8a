"""Points with bars from the least to the greatest value, as every plot here draws figures."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from measuring import Figure


def draw_error_bars(
    axes: Axes,
    points: Sequence[tuple[float, Figure]],
    label: str,
    color: str,
    marker: str,
    *,
    scale: float = 1.0,
) -> None:
    """A line through the medians at x, bars from `min` to `max`; nothing without points."""
    if not points:
        return
    medians = [figure["median"] * scale for _, figure in points]
    below = [m - figure["min"] * scale for m, (_, figure) in zip(medians, points, strict=True)]
    above = [figure["max"] * scale - m for m, (_, figure) in zip(medians, points, strict=True)]
    axes.errorbar(
        [x for x, _ in points],
        medians,
        yerr=[below, above],
        label=label,
        color=color,
        marker=marker,
        markersize=6,
        linewidth=1.6,
        capsize=3,
        zorder=3,
    )
