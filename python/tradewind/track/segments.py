"""Metrics segments: numbered, immutable files of JSON lines, one row each.

A line is {"step", "time", "attempt", name: value …}. Numbers are JSON numbers; the three that JSON
lacks are the strings "NaN", "Infinity" and "-Infinity"; everything else is an object of one key:
{"text": …}, {"histogram": …}, {"image": …}. Numbers of files grow by one from 000001.jsonl; a file
is whole when it has its name (see atomic.py), so readers need no lock, also on NFS.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tradewind.track.atomic import remove_leftovers, write_atomically
from tradewind.track.facts import non_finite_name
from tradewind.track.media import Histogram, Image
from tradewind.track.rows import Row

FOLDER_NAME = "metrics"
_FILE_NAME = re.compile(r"(\d{6,})\.jsonl")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_INT64 = range(-(2**63), 2**63)


class SegmentError(ValueError):
    """A metrics segment does not hold whole rows."""


class SegmentWriter:
    """Appends segments to a run's metrics folder. Needs the run's lock."""

    def __init__(self, run_folder: Path, attempt: int) -> None:
        self._folder = run_folder / FOLDER_NAME
        self._folder.mkdir(exist_ok=True)
        self._attempt = attempt
        remove_leftovers(self._folder)
        self._next_number = max((number for number, _ in list_segments(run_folder)), default=0) + 1

    def write(self, rows: Iterable[Row]) -> Path:
        """Make `rows` durable as one new segment. Raises OSError with no segment added."""
        lines = [encode_row(row, self._attempt) for row in rows]
        path = self._folder / f"{self._next_number:06d}.jsonl"
        write_atomically(path, "".join(lines).encode("ascii"))
        self._next_number += 1
        return path


def list_segments(run_folder: Path) -> list[tuple[int, Path]]:
    """The segments of a run with their numbers, in order."""
    folder = run_folder / FOLDER_NAME
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(match, path) for path in paths if (match := _FILE_NAME.fullmatch(path.name))]
    return sorted((int(match.group(1)), path) for match, path in found)


def read_segment(path: Path) -> list[dict[str, Any]]:
    """The rows of a segment, non-finite numbers restored. Raises SegmentError naming the file."""
    data = path.read_bytes()
    lines = data.split(b"\n")
    if lines.pop():
        raise _torn(path, len(lines) + 1, "the line does not end")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _torn(path, number, str(error)) from None
        if not _is_row(row):
            raise _torn(path, number, "step, time or attempt is missing")
        rows.append({name: decode_value(value) for name, value in row.items()})
    return rows


def encode_row(row: Row, attempt: int) -> str:
    """One line of a segment, its newline included."""
    cells: dict[str, object] = {"step": row.step, "time": row.time, "attempt": attempt}
    for name, value in row.values.items():
        cells[name] = _encode_value(value)
    return json.dumps(cells, allow_nan=False, separators=(",", ":")) + "\n"


def decode_value(value: Any) -> Any:
    """A cell as Python: non-finite numbers restored, objects as they are."""
    return _NON_FINITE[value] if isinstance(value, str) and value in _NON_FINITE else value


def _encode_value(value: Any) -> object:
    if type(value) is float:
        return value if math.isfinite(value) else non_finite_name(value)
    if type(value) is int:
        return value if value in _INT64 else _encode_value(_as_float(value))
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, Histogram):
        edges, counts, num_non_finite = value.counted()
        return {"histogram": {"edges": edges, "counts": counts, "non_finite": num_non_finite}}
    if isinstance(value, Image):
        height, width, channels = value.pixels().shape
        return {"image": {"height": height, "width": width, "channels": channels}}
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and type(row.get("time")) in (int, float)
        and type(row.get("attempt")) is int
    )


def _torn(path: Path, line: int, reason: str) -> SegmentError:
    return SegmentError(
        f"metrics segment {str(path)!r}, line {line}: expected a whole row in JSON ({reason}); "
        "copy the file again from the machine that trained, or move it away to read the rest"
    )
