"""A run: one training job and its directory, owned by one live process.

Lock first, then the record, then metrics: whoever holds the lock is the only writer. Everything is
bound to the process that opened the run: in a forked child `log` is an error, and closing does
nothing.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tradewind.place import place
from tradewind.track import current
from tradewind.track.facts import gather_facts, json_safe, utc_now
from tradewind.track.lock import RunLock
from tradewind.track.record import CLOSING_STATUSES, RunJournal
from tradewind.track.rows import MAX_STEP, checked_step
from tradewind.track.writer import MetricsWriter


class Run:
    """The owner's handle on a run directory. Made by `Run.open`; a context manager.

    `path` the directory, `attempt` this process's number in run.json (from 1), `step` the newest
    step (the Engine sets it; `log` moves it), `owner_pid` the process that may write,
    `wanted_ending` how a signal handler asked to close it while a flush was under way.
    """

    def __init__(
        self, path: Path, lock: RunLock, journal: RunJournal, writer: MetricsWriter
    ) -> None:
        """For `Run.open` only, which takes the directory's lock first."""
        self.path = path
        self.attempt = journal.attempt
        self.step = 0
        self.owner_pid = os.getpid()
        self.wanted_ending: tuple[str, str | None] | None = None
        self._lock = lock
        self._journal = journal
        self._writer = writer
        self._is_closed = False

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, config: Mapping[str, object], seed: int | None = None
    ) -> Run:
        """Own the run directory `path`: made where missing, else continued as a new attempt.

        `config` is kept in run.json, JSON-safe and without secrets. Raises TypeError or ValueError
        for bad arguments, NotADirectoryError or PermissionError for an unusable path,
        RunLockedError where another run is live there, RunRecordError for a foreign run.json.
        """
        folder = _checked_path(path)
        facts = _checked_facts(config, seed)
        _make_folder(folder)
        started = utc_now()
        lock = RunLock(folder, started)
        try:
            journal = RunJournal(folder, facts, started)
            run = cls(folder, lock, journal, MetricsWriter(folder, journal.attempt))
        except BaseException:
            lock.release()
            raise
        current.enter(run)
        return run

    @property
    def is_closed(self) -> bool:
        """Whether the run was closed by this handle."""
        return self._is_closed

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Note `values` for `step`: numbers, text, 0-d tensors, Image, Histogram.

        Several calls for one step make one row; a later value of a name wins. Tensors are read at
        the next flush. Raises TypeError or ValueError that names the key, RuntimeError for a
        closed run or in a forked child. A disk that is full costs a warning, no rows.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            step = checked_step(step)
        if self._is_closed or os.getpid() != self.owner_pid:
            raise self._refusal()
        self._writer.add(step, values)
        self.step = step
        if self.wanted_ending is not None:
            self.close(*self.wanted_ending)

    def flush(self) -> None:
        """Write everything that was logged so far; flushes come by themselves at intervals.

        Does nothing in a forked child or once closed. Raises OSError that names the path where
        the disk refuses; the rows are kept and tried again.
        """
        if not self._is_closed and os.getpid() == self.owner_pid:
            self._writer.flush()
            if self.wanted_ending is not None:
                self.close(*self.wanted_ending)

    def close(self, status: str = "finished", error: str | None = None) -> None:
        """Write everything, record `status` ("finished", "failed", "stopped"), drop the lock.

        Does nothing in a forked child or when called again. Raises OSError where the disk
        refuses: the run then stays open with its rows, and `close` may be called again.
        """
        if status not in CLOSING_STATUSES:
            raise ValueError(
                f"Run.close: status: expected one of {', '.join(CLOSING_STATUSES)}, got {status!r}"
            )
        if self._is_closed or os.getpid() != self.owner_pid:
            return
        if self._writer.is_flushing_here:  # in a signal handler: as soon as that flush is done
            self.wanted_ending = (status, error)
            return
        try:
            self._writer.close()
            self._journal.end(status, error)
        except OSError as problem:
            raise self._unwritten(problem) from problem
        self._is_closed = True
        current.leave(self)
        self._lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception is None:
            self.close()
            return
        try:
            self.close(*current.ending_of(exception))
        except OSError as problem:  # must not hide the exception that ends the run
            warnings.warn(str(problem), stacklevel=2)

    def __reduce__(self) -> str:
        raise TypeError(
            "Run: cannot be pickled or copied (it owns the lock of its directory); log from the "
            "process that opened it, or hand over run.path"
        )

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"Run({str(self.path)!r}, attempt={self.attempt}, step={self.step}, {state})"

    def _refusal(self) -> RuntimeError:
        if self._is_closed:
            return RuntimeError(
                f"run {str(self.path)!r} is closed; Run.open it again to add an attempt"
            )
        return RuntimeError(
            f"run {str(self.path)!r} belongs to process {self.owner_pid}, this is its child "
            f"{os.getpid()}; return the numbers to the parent and log them there"
        )

    def _unwritten(self, problem: OSError) -> OSError:
        return OSError(
            problem.errno,
            f"run {str(self.path)!r} could not be closed ({problem}); {self._writer.num_waiting} "
            "row(s) wait in memory: make room or make the directory writable, then close() again",
        )


def _checked_path(path: str | os.PathLike[str]) -> Path:
    if not os.fspath(path):
        raise ValueError("Run.open: path: expected a directory, got an empty path; name one")
    folder = Path(path).absolute()
    for each in (folder, *folder.parents):
        if each.is_dir():
            break
        if each.exists():
            raise NotADirectoryError(
                errno.ENOTDIR,
                f"Run.open: expected a directory, but {str(each)!r} is a file; choose another path",
                str(folder),
            )
    return folder


def _checked_facts(config: Mapping[str, object], seed: int | None) -> dict[str, object]:
    if not isinstance(config, Mapping):
        raise TypeError(
            f"Run.open: config: expected a mapping of names to values, got "
            f"{type(config).__name__}; for argparse pass vars(args)"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(
            f"Run.open: seed: expected an integer or None, got {type(seed).__name__} {seed!r}"
        )
    return {**gather_facts(place()), "config": json_safe(config), "seed": seed}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _not_writable(folder) from error
        raise
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _not_writable(folder)


def _not_writable(folder: Path) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        "Run.open: expected a directory this process may write to; change its permissions, mount "
        "it writable, or choose another path",
        str(folder),
    )
