"""The live runs of this process, innermost last, and what happens to them when it exits."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tradewind.track.run import Run

_live: list[Run] = []
_exception_before: dict[int, int] = {}  # id(run) → id of the last exception at its opening


def current_run() -> Run | None:
    """The innermost live run of this process, or None."""
    for run in reversed(_live):
        if run.owner_pid == os.getpid():
            return run
    return None


def log(**values: object) -> None:
    """Log to the innermost live run at its newest step: `tw.log(accuracy=0.9)`.

    Raises RuntimeError where no run is live, otherwise as `Run.log`.
    """
    run = current_run()
    if run is None:
        raise RuntimeError(
            "tradewind.log: expected a live run in this process, found none; open one with "
            "Run.open(path, config={...}) or Engine(..., run=path), and log from the process that "
            "opened it"
        )
    run.log(run.step, values)


def enter(run: Run) -> None:
    """Note `run` as the innermost; it is closed at exit if nobody closes it."""
    if not _live:
        atexit.register(_close_all)
    _live.append(run)
    # A notebook keeps its last exception for ever: one from before the run says nothing about it.
    _exception_before[id(run)] = id(_last_exception())


def leave(run: Run) -> None:
    """Forget a closed run."""
    _live.remove(run)
    _exception_before.pop(id(run), None)
    if not _live:
        atexit.unregister(_close_all)


def _close_all() -> None:
    for run in reversed(list(_live)):
        if run.owner_pid != os.getpid():
            continue
        status, error = run.wanted_ending or _ending(_exception_before.get(id(run), 0))
        try:
            run.close(status, error)
        except OSError as problem:
            warnings.warn(f"at exit: {problem}", stacklevel=1)


def _ending(id_before: int) -> tuple[str, str | None]:
    last = _last_exception()
    if last is None or id(last) == id_before:
        return "finished", None
    return ending_of(last)


def ending_of(exception: BaseException) -> tuple[str, str | None]:
    """Status and error text of a run that ended by `exception`."""
    text = f"{type(exception).__name__}: {exception}".rstrip(": ")
    if isinstance(exception, SystemExit):
        return ("finished", None) if not exception.code else ("failed", text)
    if isinstance(exception, KeyboardInterrupt):
        return "stopped", text
    return "failed", text


def _last_exception() -> BaseException | None:
    last: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return last
