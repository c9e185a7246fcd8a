"""Progress of a training loop: a bar on a terminal, plain lines elsewhere, a plot in a notebook.

`update` is called each batch and only counts, until the display is due; only then is the loss read.
Trouble with the display (a closed pipe, a broken terminal) ends the display, never the training.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TextIO, get_args

Mode = Literal["auto", "terminal", "lines", "notebook", "off"]
_RATE_WINDOW_S = 10.0
_MIN_WINDOW_S = 0.1  # a rate over less is noise


@dataclass
class Snapshot:
    """What a display shows. `rate` in samples per second and `eta_s` are None until known."""

    description: str
    batch: int
    total_batches: int | None
    step: int
    rate: float | None
    eta_s: float | None
    loss: float | None
    fields: Mapping[str, float | str] = field(default_factory=dict)


class Display(Protocol):
    """One way to show progress; drawn at most once each `interval_s`."""

    interval_s: float

    def draw(self, snapshot: Snapshot) -> None: ...

    def close(self, last: Snapshot | None) -> None: ...


class Progress:
    """Counts batches and draws them. `mode` "auto" takes a notebook's plot in a Jupyter kernel, a
    bar on a terminal, lines otherwise; ranks other than 0 pass "off". `stream` is sys.stderr unless
    given; `initial_batches` is where a resumed epoch begins."""

    def __init__(
        self,
        total_batches: int | None,
        *,
        stream: TextIO | None = None,
        mode: Mode = "auto",
        description: str = "",
        initial_batches: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for an unknown mode or a negative number of batches."""
        if mode not in get_args(Mode):
            expected = ", ".join(get_args(Mode))
            raise ValueError(f"Progress: mode: expected one of {expected}, got {mode!r}")
        if (total_batches is not None and total_batches < 0) or initial_batches < 0:
            raise ValueError(
                "Progress: expected total_batches and initial_batches of 0 or more (total_batches "
                f"None where unknown), got {total_batches} and {initial_batches}"
            )
        self._description = description
        self._total, self._batch, self._initial = total_batches, initial_batches, initial_batches
        self._clock = clock
        self._rate = _Rate(clock())
        self._step, self._samples = 0, 0
        self._loss: Any = None
        self._fields: Mapping[str, float | str] = {}
        self._drawn_batch = -1
        self._due = clock()
        self._pid = os.getpid()
        self._display: Display | None = self._opened(mode, stream)

    def update(
        self,
        *,
        step: int,
        samples: int,
        loss: Any = None,
        fields: Mapping[str, float | str] | None = None,
    ) -> None:
        """Count one batch of `samples` samples that ended at `step`.

        `loss` is a number, a tensor, or a callable that returns one; it is kept unread, and read
        by float() only when a drawing is due. `fields` are shown beside it by name.
        """
        self._batch += 1
        self._samples += samples
        self._step = step
        if loss is not None:
            self._loss = loss
        if fields is not None:
            self._fields = fields
        if self._display is not None and self._clock() >= self._due:
            self._draw()

    def close(self) -> None:
        """Draw the last state and leave the display; may be called again."""
        display, self._display = self._display, None
        if display is None or os.getpid() != self._pid:
            return
        try:
            is_new = self._batch not in (self._drawn_batch, self._initial)
            display.close(self._snapshot() if is_new else None)
        except Exception:
            return  # the display is gone: a closed stream, a broken terminal

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _opened(self, mode: Mode, stream: TextIO | None) -> Display | None:
        stream = sys.stderr if stream is None else stream
        try:
            mode = _detected_mode(stream) if mode == "auto" else mode
            if mode == "off" or stream is None:
                return None
            if mode == "lines":
                return Lines(stream)
            if mode == "terminal":
                from tradewind.progress_bar import Bar

                return Bar(stream, self._description, self._total, self._batch)
            from tradewind.progress_plot import Plot

            return Plot()
        except Exception:
            return Lines(stream) if stream is not None else None

    def _draw(self) -> None:
        if os.getpid() != self._pid:  # a forked child counts for itself and shows nothing
            self._display = None
        if self._display is None:
            return
        try:
            self._display.draw(self._snapshot())
            self._drawn_batch = self._batch
            self._due = self._clock() + self._display.interval_s
        except Exception:
            self._abandon()

    def _abandon(self) -> None:
        display, self._display = self._display, None
        try:
            if display is not None:
                display.close(None)
        except Exception:
            return  # it failed before, and nothing depends on it

    def _snapshot(self) -> Snapshot:
        rates = self._rate.at(self._clock(), self._samples, self._batch - self._initial)
        eta_s = None
        if self._total is not None and rates is not None and rates[1] > 0:
            eta_s = max(0, self._total - self._batch) / rates[1]
        return Snapshot(
            self._description,
            self._batch,
            self._total,
            self._step,
            None if rates is None else rates[0],
            eta_s,
            _number(self._loss),
            self._fields,
        )


class Lines:
    """One ASCII line at most each ten seconds, with the first batch and the last."""

    interval_s = 10.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, snapshot: Snapshot) -> None:
        """Write one line and flush it."""
        text = " ".join(line_of(snapshot).split())
        self._stream.write(text.encode("ascii", "replace").decode("ascii") + "\n")
        self._stream.flush()

    def close(self, last: Snapshot | None) -> None:
        """Write the last line, unless it is there already."""
        if last is not None:
            self.draw(last)


class _Rate:
    """Samples and batches per second over the last ten seconds."""

    def __init__(self, now: float) -> None:
        self._points: deque[tuple[float, int, int]] = deque([(now, 0, 0)])

    def at(self, now: float, samples: int, batches: int) -> tuple[float, float] | None:
        self._points.append((now, samples, batches))
        while len(self._points) > 2 and now - self._points[1][0] >= _RATE_WINDOW_S:
            self._points.popleft()
        then, samples_then, batches_then = self._points[0]
        if now - then < _MIN_WINDOW_S:
            return None
        return (samples - samples_then) / (now - then), (batches - batches_then) / (now - then)


def line_of(snapshot: Snapshot) -> str:
    """The snapshot in one line: "train: batch 12/100  step 12  samples/s 350  loss 0.42"."""
    total = "" if snapshot.total_batches is None else f"/{snapshot.total_batches}"
    head = f"{snapshot.description}: " if snapshot.description else ""
    return "  ".join(
        [f"{head}batch {snapshot.batch}{total}", f"step {snapshot.step}", *details(snapshot)]
    )


def details(snapshot: Snapshot) -> list[str]:
    """Rate, loss, time left and fields as short texts, the most wanted first."""
    parts = [] if snapshot.rate is None else [f"samples/s {_rate_text(snapshot.rate)}"]
    if snapshot.loss is not None:
        parts.append(f"loss {snapshot.loss:.4g}")
    if snapshot.eta_s is not None:
        parts.append(f"eta {duration_text(snapshot.eta_s)}")
    for name, value in snapshot.fields.items():
        parts.append(f"{name} {value if isinstance(value, str) else format(float(value), '.4g')}")
    return [" ".join(part.split()) for part in parts]


def _rate_text(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def duration_text(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _number(value: Any) -> float | None:
    if callable(value):
        value = value()
    return None if value is None else float(value)


def _detected_mode(stream: TextIO | None) -> Mode:
    if is_notebook():
        return "notebook"
    return "terminal" if stream is not None and stream.isatty() else "lines"


def is_notebook() -> bool:
    """Whether this process is a Jupyter kernel. Loads nothing."""
    ipython = sys.modules.get("IPython")
    try:
        shell = ipython.get_ipython() if ipython is not None else None
    except Exception:
        return False
    return shell is not None and getattr(shell, "kernel", None) is not None
