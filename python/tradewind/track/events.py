"""TensorBoard event files of a run: one event per row, from tensorboard's own protos and records.

tensorboard's EventFileWriter is not used: it imports TensorFlow where that is installed, and its
thread loses what was queued when the disk is full. Here a failed write cuts the file back to its
last whole record and keeps the rest for the next flush.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tradewind.track.atomic import write_all
from tradewind.track.media import Histogram, Image
from tradewind.track.rows import Row

FOLDER_NAME = "events"


class EventLog:
    """The event file of one attempt, made with the first rows. Needs the run's lock."""

    def __init__(self, run_folder: Path, attempt: int) -> None:
        self._folder = run_folder / FOLDER_NAME
        self._attempt = attempt
        self._descriptor = -1
        self._has_header = False
        self._num_bytes = 0
        self._waiting = io.BytesIO()

    def add(self, rows: Iterable[Row]) -> None:
        """Encode `rows`; `flush` writes them. Imports tensorboard the first time."""
        for row in rows:
            if not self._has_header:
                self._add_header(row)
            self._append(_event(row))

    def flush(self) -> None:
        """Write what waits. Raises OSError with whole records in the file and the rest kept."""
        if not self._waiting.tell():
            return
        if self._descriptor < 0:
            self._descriptor = self._open()
        data = self._waiting.getvalue()
        try:
            write_all(self._descriptor, data)
        except OSError:
            os.ftruncate(self._descriptor, self._num_bytes)
            os.lseek(self._descriptor, self._num_bytes, os.SEEK_SET)
            raise
        self._num_bytes += len(data)
        self._waiting = io.BytesIO()

    def close(self) -> None:
        """Flush and close the file. Raises OSError as `flush` does; may be called again."""
        self.flush()
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _open(self) -> int:
        self._folder.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names: time, then attempt.
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{self._attempt:06d}."
            f"{socket.gethostname()}.{os.getpid()}"
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.open(self._folder / name, flags, 0o666)

    def _add_header(self, first_row: Row) -> None:
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped,unused-ignore]

        self._has_header = True
        self._append(event_pb2.Event(wall_time=first_row.time, file_version="brain.Event:2"))
        if self._attempt > 1:
            # Tells TensorBoard to drop earlier attempts' events from this step on, as Metrics does.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            step = first_row.step
            self._append(event_pb2.Event(wall_time=first_row.time, step=step, session_log=start))

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped,unused-ignore]

        RecordWriter(self._waiting).write(event.SerializeToString())


def _event(row: Row) -> Any:
    from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped,unused-ignore]

    event = event_pb2.Event(wall_time=row.time, step=row.step)
    for name, value in row.values.items():
        tag = name.encode("utf-8", "replace").decode("utf-8")
        summary_value = event.summary.value.add(tag=tag)
        if isinstance(value, str):
            _set_text(summary_value, value)
        elif isinstance(value, Image):
            _set_image(summary_value, value)
        elif isinstance(value, Histogram):
            _set_histogram(summary_value, value)
        else:
            summary_value.simple_value = _as_float(value)
    return event


def _set_text(summary_value: Any, text: str) -> None:
    import numpy as np
    from tensorboard.plugins.text import metadata  # type: ignore[import-untyped,unused-ignore]
    from tensorboard.util import tensor_util  # type: ignore[import-untyped,unused-ignore]

    data = np.array([text.encode("utf-8", "replace")], dtype=object)
    summary_value.tensor.CopyFrom(tensor_util.make_tensor_proto(data))
    summary_value.metadata.CopyFrom(metadata.create_summary_metadata(None, None))


def _set_image(summary_value: Any, image: Image) -> None:
    height, width, channels = image.pixels().shape
    summary_value.image.height = height
    summary_value.image.width = width
    summary_value.image.colorspace = channels
    summary_value.image.encoded_image_string = image.png()


def _set_histogram(summary_value: Any, histogram: Histogram) -> None:
    import numpy as np
    from tensorboard.plugins.histogram import metadata  # type: ignore[import-untyped,unused-ignore]
    from tensorboard.util import tensor_util  # type: ignore[import-untyped,unused-ignore]

    edges, counts, _ = histogram.counted()
    buckets = np.array(
        list(zip(edges[:-1], edges[1:], counts, strict=True)), dtype=np.float64
    ).reshape(-1, 3)
    summary_value.tensor.CopyFrom(tensor_util.make_tensor_proto(buckets, dtype=np.float64))
    summary_value.metadata.CopyFrom(metadata.create_summary_metadata(None, None))


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
