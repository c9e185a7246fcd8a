"""How long a store's calls are tried, and what is raised when that was not enough."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")


class StoreError(OSError):
    """A call to an object store failed: names the store, the operation and what to do.

    `transient`: the same call may succeed later (the store did not answer, or was overloaded), as
    against a bucket that is not there or credentials that are refused. `status`: the HTTP status,
    0 where there was none; `code`: the store's own word for it.
    """

    def __init__(
        self, message: str, *, transient: bool = False, status: int = 0, code: str = ""
    ) -> None:
        super().__init__(message)
        self.transient = transient
        self.status = status
        self.code = code


class Deadline:
    """An instant by which something has to be done. Any thread may ask."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self._end_s = time.monotonic() + limit.total_seconds()

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.remaining_s == 0.0

    def check(self, where: str) -> None:
        """Raise a transient StoreError where the deadline has passed."""
        if self.has_passed:
            raise StoreError(
                f"{where}: not done within {self.limit.total_seconds():g} s; is the store slow, or "
                "the deadline too short?",
                transient=True,
            )


@dataclass(frozen=True)
class Patience:
    """Limits of one store's calls.

    `request`: of a small one with its retries; a transfer has a deadline of its own. `silence`: of
    a connection that says nothing, after which the request is sent anew, so a call may overrun its
    deadline by that much. `num_tries` of one request; pauses between them double from
    `first_pause` to `longest_pause`, and are cut at random so that ranks do not return in step.
    """

    request: timedelta = timedelta(seconds=60)
    silence: timedelta = timedelta(seconds=15)
    num_tries: int = 10
    first_pause: timedelta = timedelta(milliseconds=100)
    longest_pause: timedelta = timedelta(seconds=5)

    def __post_init__(self) -> None:
        if self.num_tries < 1:
            raise ValueError(f"num_tries: expected at least 1, got {self.num_tries}")
        for name in ("request", "silence", "first_pause", "longest_pause"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name}: expected a positive duration, got {getattr(self, name)}")

    def retried(self, once: Callable[[], T], deadline: Deadline) -> T:
        """What `once` returns, tried again after every transient StoreError.

        Raises the last StoreError, with the number of tries, once they or the time are used up.
        """
        for number in range(1, self.num_tries + 1):
            try:
                return once()
            except StoreError as error:
                if not error.transient:
                    raise
                pause_s = self._pause_s(number)
                if number == self.num_tries or deadline.remaining_s <= pause_s:
                    raise StoreError(
                        f"{error} (tried {number} time{'s' if number > 1 else ''})",
                        transient=True,
                        status=error.status,
                        code=error.code,
                    ) from error
                time.sleep(pause_s)
        raise AssertionError("unreachable: the last try returns or raises")

    def _pause_s(self, number: int) -> float:
        full = self.first_pause.total_seconds() * 2.0 ** (number - 1)
        return min(full, self.longest_pause.total_seconds()) * random.uniform(0.5, 1.0)
