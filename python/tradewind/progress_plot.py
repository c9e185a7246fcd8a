"""The notebook's display: one plot of the loss, redrawn in place. No widgets, no pyplot."""

from __future__ import annotations

import io
import math
from typing import Any

from tradewind.progress import Snapshot, line_of

_MAX_POINTS = 2_000


class Plot:
    """A picture that is replaced at most each half second; older points thin out as it fills."""

    interval_s = 0.5

    def __init__(self) -> None:
        from IPython.display import display

        waiting = {"text/plain": "waiting for the first batch"}
        show: Any = display
        self._handle = show(waiting, raw=True, display_id=True)
        self._steps: list[int] = []
        self._losses: list[float] = []

    def draw(self, snapshot: Snapshot) -> None:
        """Add the snapshot's loss and replace the picture."""
        if snapshot.loss is not None and math.isfinite(snapshot.loss):
            self._steps.append(snapshot.step)
            self._losses.append(snapshot.loss)
        if len(self._steps) > _MAX_POINTS:
            self._steps, self._losses = self._steps[::2], self._losses[::2]
        text = line_of(snapshot)
        data = {"image/png": self._picture(text), "text/plain": text}
        self._handle.update(data, raw=True)

    def close(self, last: Snapshot | None) -> None:
        """Draw the last state; the picture stays in the notebook."""
        if last is not None:
            self.draw(last)

    def _picture(self, title: str) -> str:
        import base64

        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3), dpi=100, layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self._steps, self._losses, linewidth=1.5, color="#2563a8")
        axes.set_title(title, fontsize=8, loc="left", parse_math=False)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.25)
        if self._losses and 0 < min(self._losses) * 100 < max(self._losses):
            axes.set_yscale("log")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return base64.b64encode(buffer.getvalue()).decode("ascii")
