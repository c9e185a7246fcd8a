"""What the optimizer's passes saw of each parameter, as the ratios people look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def parameter_stats(
    names: Sequence[str], columns: Mapping[str, Sequence[float]], gradient_multiplier: float
) -> dict[str, dict[str, float]]:
    """By parameter name, from the columns of `OptimizerTable.statistics()`."""
    stats: dict[str, dict[str, float]] = {}
    rows = zip(*(columns[column] for column in _COLUMNS), strict=True)
    for index, count, squares, largest, zeros, before, change in rows:
        stats[names[int(index)]] = {
            "grad_norm": math.sqrt(squares) * gradient_multiplier,
            "grad_max": largest * gradient_multiplier,
            "zero_fraction": zeros / count if count else 0.0,
            "update_ratio": math.sqrt(change / before) if before else math.nan,
        }
    return stats


_COLUMNS = (
    "parameter_idx",
    "num_elements",
    "gradient_squares",
    "gradient_max",
    "num_zeros",
    "parameter_squares",
    "change_squares",
)
