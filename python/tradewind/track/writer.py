"""Collects rows in memory and writes them at intervals as a segment and TensorBoard events.

`add` is what the training loop pays for; formatting, reading tensors and the disk come at a flush.
A flush that fails loses nothing: rows wait for the next one. `add` may come from several threads.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tradewind.track.events import EventLog
from tradewind.track.rows import Row, admit, merge, read_tensors
from tradewind.track.segments import SegmentWriter

FIRST_FLUSH_S = 1.0
MIN_INTERVAL_S = 2.0
MAX_INTERVAL_S = 60.0
MAX_WAITING_ROWS = 5_000
MAX_WAITING_MEDIA_BYTES = 64 << 20
_SHARE_OF_TIME = 100  # one flush each hundredth of the run: a day makes some 1,500 segments


def flush_interval_s(elapsed_s: float, last_flush_s: float) -> float:
    """Seconds to the next flush: 1% of the run so far, more where the disk is slow, within
    2 to 60 s."""
    wanted = _SHARE_OF_TIME * last_flush_s
    return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, elapsed_s / _SHARE_OF_TIME, wanted))


class MetricsWriter:
    """The rows of one attempt on their way to disk. Needs the run's lock."""

    def __init__(
        self, run_folder: Path, attempt: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = run_folder
        self._segments = SegmentWriter(run_folder, attempt)
        self._events = EventLog(run_folder, attempt)
        self._has_events = True
        self._clock = clock
        self._started = clock()
        self._due = self._started + FIRST_FLUSH_S
        # A deque, because append and popleft are atomic on the same object: a row added while
        # another thread flushes is in this flush or in the next.
        self._logged: deque[tuple[int, float, dict[str, Any]]] = deque()
        self._rows: dict[int, Row] = {}  # merged, not written yet
        self._newest_step = -1
        self._row_limit = MAX_WAITING_ROWS
        self._media_bytes = 0
        self._has_warned = False
        self._mutex = threading.RLock()
        self._flushing_thread = 0

    @property
    def is_flushing_here(self) -> bool:
        """Whether this thread is inside a flush: True only for a signal handler that cut in."""
        return self._flushing_thread == threading.get_ident()

    @property
    def num_waiting(self) -> int:
        """Log calls and rows in memory that are not on disk."""
        return len(self._logged) + len(self._rows)

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Take the values of a step. Raises TypeError or ValueError for values of other kinds."""
        admitted, media_bytes = admit(values)
        self._logged.append((step, time.time(), admitted))
        self._newest_step = step
        self._media_bytes += media_bytes
        if (
            len(self._logged) >= self._row_limit
            or self._clock() >= self._due
            or self._media_bytes > MAX_WAITING_MEDIA_BYTES
        ):
            self._flush_in_passing()

    def flush(self, *, hold_newest: bool = False) -> None:
        """Write what waits, with `hold_newest` without the newest step, for which more may come (a
        step logged to after it was written makes a second row, which readers merge).

        Raises OSError that names the path; the rows are kept then.
        """
        with self._mutex:
            if self.is_flushing_here:
                return
            self._flushing_thread = threading.get_ident()
            began = self._clock()
            try:
                self._write(hold_newest)
                self._row_limit, self._has_warned = MAX_WAITING_ROWS, False
            finally:
                self._flushing_thread = 0
                now = self._clock()
                self._due = now + flush_interval_s(now - self._started, now - began)

    def close(self) -> None:
        """Write everything. Raises OSError with the rows kept; may be called again."""
        self.flush()
        if self._has_events:
            self._events.close()

    def _flush_in_passing(self) -> None:
        if not self._mutex.acquire(blocking=False):
            return  # another thread is at it
        try:
            self.flush(hold_newest=True)
        except OSError as error:
            self._row_limit = len(self._logged) + MAX_WAITING_ROWS
            self._media_bytes = 0
            self._warn(error)
        finally:
            self._mutex.release()

    def _write(self, hold_newest: bool) -> None:
        while self._logged:
            merge(self._rows, self._logged[0])  # twice after an interrupt is the same; lost is not
            self._logged.popleft()
        rows = [
            row
            for step, row in self._rows.items()
            if not (hold_newest and step == self._newest_step)
        ]
        if rows:
            self._read(rows)
            self._segments.write(rows)
            for row in rows:
                del self._rows[row.step]
            self._add_events(rows)
        if self._has_events:
            self._events.flush()
        self._media_bytes = 0

    def _read(self, rows: list[Row]) -> None:
        lost = read_tensors(rows)
        if lost:
            warnings.warn(
                f"run {str(self._folder)!r}: {len(lost)} logged tensor(s) could not be read from "
                f"their device any more ({', '.join(sorted(set(lost))[:5])}); the other values of "
                "their rows are kept",
                stacklevel=2,
            )

    def _add_events(self, rows: list[Row]) -> None:
        if not self._has_events:
            return
        try:
            self._events.add(rows)
        except Exception as error:
            self._has_events = False
            warnings.warn(
                f"run {str(self._folder)!r}: no TensorBoard events from here on ({error!r}); the "
                "metrics segments go on, and hold everything but pictures",
                stacklevel=2,
            )

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"run {str(self._folder)!r}: metrics cannot be written now ({error}); "
            f"{self.num_waiting} rows wait in memory and are tried again at intervals: make room, "
            "or make the directory writable",
            stacklevel=2,
        )
