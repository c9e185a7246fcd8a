"""metrics.sqlite: an index over the metrics segments, made and kept up by readers only.

The segments are the truth; the index may be deleted at any time. It lies in the run directory where
that is a writable local disk (SQLite's locks cannot be trusted on network disks), else in memory.
A row of a later attempt replaces what earlier attempts logged from the step where the later one
began: a resumed run continues its curve, a repeated one replaces it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from tradewind import machine
from tradewind.track import schema
from tradewind.track.record import read_run
from tradewind.track.segments import list_segments, read_segment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILE_NAME = "metrics.sqlite"
_BUSY_DEADLINE_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True)
class Series:
    """One value over the steps, in order of steps: parallel arrays of steps, times (Unix seconds)
    and values (NaN and infinities as logged). Iterates as (step, time, value)."""

    name: str
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        yield from zip(self.steps.tolist(), self.times.tolist(), self.values.tolist(), strict=True)


def open_metrics(
    run_path: str | Path, *, filesystem: Callable[[Path], str] = machine.filesystem_type
) -> Metrics:
    """The metrics of a run directory, live or ended, as of now; `refresh` looks again.

    `filesystem` tells the type of the disk. Raises RunRecordError where `run_path` is no run
    directory, SegmentError for a damaged segment; both are ValueErrors.
    """
    folder = Path(run_path)
    if not list_segments(folder):
        read_run(folder)  # a directory without segments must at least be a run's
    return Metrics(folder, filesystem)


class Metrics:
    """What a run logged. A context manager; use it from the thread that opened it."""

    def __init__(self, run_folder: Path, filesystem: Callable[[Path], str]) -> None:
        self._folder = run_folder
        self.index_path = _index_path(run_folder, filesystem)
        self._connection = self._open()
        self.refresh()

    def refresh(self) -> None:
        """Take in segments written since. Raises SegmentError for a damaged one."""
        try:
            self._update()
        except sqlite3.DatabaseError as error:
            self._repair(error)
            self._update()

    def names(self) -> list[str]:
        """Names of the logged numbers, sorted."""
        return [str(name) for (name,) in self._query(schema.SCALAR_NAMES)]

    def attempts(self) -> list[int]:
        """Numbers of the attempts that logged anything."""
        return [int(attempt) for (attempt,) in self._query(schema.ATTEMPTS)]

    def first_step(self, attempt: int) -> int:
        """The step that `attempt` logged first. Raises KeyError for one that logged nothing."""
        found = self._query(schema.FIRST_STEP, {"attempt": attempt})
        if not found:
            raise KeyError(f"attempt {attempt}: nothing was logged; attempts: {self.attempts()}")
        return int(found[0][0])

    def series(self, name: str, attempt: int | None = None) -> Series:
        """The numbers logged as `name`; of one attempt, or (None) of the run as it stands.

        Raises KeyError for a name that was never logged as a number.
        """
        import numpy as np

        if name not in self.names():
            raise KeyError(
                f"{name!r}: no number of that name was logged in {str(self._folder)!r}; logged "
                f"are: {', '.join(self.names()) or 'none yet'}"
            )
        found = self._query(schema.SERIES, {"name": name, "attempt": attempt})
        return Series(
            name,
            np.array([step for step, _, _ in found], dtype=np.int64),
            np.array([time for _, time, _ in found], dtype=np.float64),
            # NULL, which stands for NaN, becomes NaN here.
            np.array([value for _, _, value in found], dtype=np.float64),
        )

    def rows(self, attempt: int | None = None) -> Iterator[dict[str, Any]]:
        """Everything logged, a dict a step in order of steps: "step", "time", "attempt" and the
        values; text, histograms and pictures as the segments describe them."""
        row: dict[str, Any] = {}
        # Streamed, since a long run has millions; sorting makes SQLite read all before the first.
        cursor = self._tried(lambda: self._connection.execute(schema.ROWS, {"attempt": attempt}))
        for step, number, time, name, value in cursor:
            if row and (row["step"], row["attempt"]) != (step, number):
                yield row
                row = {}
            if not row:
                row = {"step": step, "time": time, "attempt": number}
            row["time"] = min(row["time"], time)
            row[name] = schema.from_cell(value)
        if row:
            yield row

    def close(self) -> None:
        """Close the index; may be called again."""
        self._connection.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        if self.index_path is None:
            return _in_memory()
        try:
            return _connect(str(self.index_path))
        except sqlite3.OperationalError:  # locked for long, read-only after all, disk full
            self.index_path = None
            return _in_memory()
        except sqlite3.DatabaseError:  # not a database, or another schema
            return self._rebuilt()

    def _rebuilt(self) -> sqlite3.Connection:
        """A new, empty index in place of one that is damaged."""
        assert self.index_path is not None
        try:
            for suffix in ("", "-journal", "-wal", "-shm"):
                Path(f"{self.index_path}{suffix}").unlink(missing_ok=True)
            return _connect(str(self.index_path))
        except (OSError, sqlite3.Error):
            self.index_path = None
            return _in_memory()

    def _repair(self, error: sqlite3.DatabaseError) -> None:
        """Put an empty, sound index in place of one that failed; in memory where the file is not
        damaged but cannot be used now. Raises `error` where memory failed."""
        if self.index_path is None:
            raise error
        self._connection.close()
        if isinstance(error, sqlite3.OperationalError):
            self.index_path, self._connection = None, _in_memory()
        else:
            self._connection = self._rebuilt()

    def _query(self, sql: str, parameters: dict[str, object] | None = None) -> list[Any]:
        return self._tried(lambda: self._connection.execute(sql, parameters or {}).fetchall())

    def _tried(self, read: Callable[[], T]) -> T:
        """`read()`, with the index rebuilt once where it turns out to be damaged."""
        try:
            return read()
        except sqlite3.DatabaseError as error:
            self._repair(error)
        self._update()
        return read()

    def _update(self) -> None:
        missing, is_fresh = self._missing()
        if missing or is_fresh:
            with _transaction(self._connection):
                missing, is_fresh = self._missing()  # another reader may have filled it meanwhile
                if is_fresh:
                    schema.clear(self._connection)
                for number, path in missing:
                    rows = read_segment(path)
                    schema.insert(self._connection, number, path.stat().st_size, rows)
                schema.update_cuts(self._connection)

    def _missing(self) -> tuple[list[tuple[int, Path]], bool]:
        """Segments to take in, and whether to start afresh because files were exchanged or arrived
        out of their order."""
        segments = list_segments(self._folder)
        known = schema.known_segments(self._connection)
        sizes = {number: path.stat().st_size for number, path in segments if number in known}
        missing = [(number, path) for number, path in segments if number not in known]
        is_late = bool(missing) and missing[0][0] < max(known, default=0)
        if is_late or sizes != known:
            return segments, True
        return missing, False


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")  # of two readers, one fills the index
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def _index_path(run_folder: Path, filesystem: Callable[[Path], str]) -> Path | None:
    if machine.is_network_filesystem(filesystem(run_folder)):
        return None
    return run_folder / FILE_NAME if os.access(run_folder, os.W_OK | os.X_OK) else None


def _in_memory() -> sqlite3.Connection:
    return _connect(":memory:")


def _connect(path: str) -> sqlite3.Connection:
    """Open and check an index. Raises sqlite3.DatabaseError for a damaged or foreign file."""
    connection = sqlite3.connect(path, timeout=_BUSY_DEADLINE_S, isolation_level=None)
    try:
        schema.prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection
