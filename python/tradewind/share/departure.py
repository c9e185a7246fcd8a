"""How a process leaves the ranks that it shares with: with the reason where it ends by an error,
and never from a forked child."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from collections.abc import MutableMapping
from weakref import WeakKeyDictionary

from tradewind._core import native
from tradewind.share.rendezvous import Meeting

# How long a process that ends by an error stays for the others to read why: it may hold the store.
_LINGER_S = 1.0

_living: MutableMapping[native.GradientRounds, Meeting] = WeakKeyDictionary()


def watch_over(shared: native.GradientRounds, meeting: Meeting) -> None:
    """Leave for `shared` too when this process ends."""
    _living[shared] = meeting


def reason(rank: int, error: BaseException, where: str = "") -> str:
    """What the other ranks are told."""
    lines = str(error).splitlines()
    text = f": {lines[0]}" if lines else ""
    return f"rank {rank} raised {type(error).__name__}{' in ' if where else ''}{where}{text}"


def _leave() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for shared, meeting in list(_living.items()):
        if error is None:
            shared.leave("its process ended")
        else:
            shared.fail(reason(meeting.rank, error))
    if error is not None:
        until = time.monotonic() + _LINGER_S
        for meeting in set(_living.values()):
            meeting.wait_until_others_know(until)


def _forget() -> None:
    """In a forked child: the threads are the parent's, and to say goodbye is its affair."""
    for shared in list(_living):
        # SAFETY: one reference too many, so that the destructor, which joins threads that do not
        # exist here, never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))
    _living.clear()


atexit.register(_leave)
os.register_at_fork(after_in_child=_forget)
