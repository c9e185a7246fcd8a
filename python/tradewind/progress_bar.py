"""The terminal's display: one line of rich, redrawn in place without a thread of its own (a thread
would not survive the forks of data workers)."""

from __future__ import annotations

from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from tradewind.progress import Snapshot, details

_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 8, 30


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit the process and point its stdout to /dev/null."""
        raise BrokenPipeError("the terminal is gone")


class Bar:
    """A rich progress bar; a spinner where the number of batches is unknown."""

    interval_s = 0.1

    def __init__(
        self, stream: TextIO, description: str, total_batches: int | None, batch: int
    ) -> None:
        self._description = " ".join(description.split())
        self._bar = BarColumn(bar_width=_MIN_BAR_WIDTH)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            SpinnerColumn() if total_batches is None else self._bar,
            TextColumn("{task.fields[text]}"),
            console=_Console(file=stream),
            auto_refresh=False,
        )
        self._task = self._progress.add_task(
            escape(self._description), total=total_batches, completed=batch, text=""
        )
        self._progress.start()

    def draw(self, snapshot: Snapshot) -> None:
        """Redraw the line."""
        text, bar_width = self._fitted(snapshot)
        self._bar.bar_width = bar_width
        self._progress.update(self._task, completed=snapshot.batch, text=escape(text), refresh=True)

    def close(self, last: Snapshot | None) -> None:
        """Draw the last state, leave it on the screen and give the cursor back."""
        try:
            if last is not None:
                self.draw(last)
        finally:
            self._progress.stop()

    def _fitted(self, snapshot: Snapshot) -> tuple[str, int]:
        """As many details as the terminal is wide for, and the bar's width beside them."""
        total = "" if snapshot.total_batches is None else f"/{snapshot.total_batches}"
        step = [] if snapshot.step == snapshot.batch else [f"step {snapshot.step}"]
        parts = [f"{snapshot.batch}{total}", *step, *details(snapshot)]
        room = self._progress.console.width - cell_len(self._description) - 3
        while len(parts) > 1 and cell_len("  ".join(parts)) + _MIN_BAR_WIDTH > room:
            parts.pop()
        text = "  ".join(parts)
        width = min(_MAX_BAR_WIDTH, max(_MIN_BAR_WIDTH, room - cell_len(text)))
        return text, width
