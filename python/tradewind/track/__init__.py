"""The run directory: what a training job was, what it logged, and how to read it back.

A trainer owns a directory by `Run.open`; readers use `read_run` for the record and `open_metrics`
for the curves, live or later. Nothing here imports torch.
"""

from __future__ import annotations

from tradewind.track.current import current_run, log
from tradewind.track.index import Metrics, Series, open_metrics
from tradewind.track.lock import RunLockedError
from tradewind.track.media import Histogram, Image
from tradewind.track.record import (
    ENDED_WITHOUT_CLOSING,
    RunRecord,
    RunRecordError,
    read_run,
    run_status,
)
from tradewind.track.run import Run
from tradewind.track.segments import SegmentError

__all__ = [
    "ENDED_WITHOUT_CLOSING",
    "Histogram",
    "Image",
    "Metrics",
    "Run",
    "RunLockedError",
    "RunRecord",
    "RunRecordError",
    "SegmentError",
    "Series",
    "current_run",
    "log",
    "open_metrics",
    "read_run",
    "run_status",
]
