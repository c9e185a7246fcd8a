"""Notices that this machine goes soon: signals of the scheduler, and the metadata services of AWS,
GCP and Azure. They only say so; whoever trains asks `notice()` at each step boundary.

One `Notices` lives in the process that trains, made and closed by its main thread; `notice()` may
be called from any thread. Forked children get the handlers that were there before."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from tradewind.checkpoint.notice_services import Finding, Service, services_of

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_CLOSING_S = 2.0  # a thread that hangs in spite of its deadlines is left behind; it is a daemon

# The live ones of this process, for its forked children to let go of.
_living: weakref.WeakSet[Notices] = weakref.WeakSet()


@dataclass(frozen=True)
class Notice:
    """`kind`: "SIGTERM", "SIGUSR1", "aws-spot", "aws-rebalance", "gcp-preempted",
    "gcp-maintenance", "azure-preempt" or "azure-terminate". Seen at `at_s`, the machine goes at
    `deadline_s` as far as is known (None: not known), both of `time.monotonic()`. A soft one asks
    for a checkpoint, not for the end."""

    kind: str
    at_s: float
    deadline_s: float | None
    is_soft: bool = False


class Notices:
    """Listens for notices until `close()`.

    Args:
        signals: which to handle. Only the main thread can; made elsewhere, none is handled, and
            `handles_signals` says so. A handler that was there before is called as well; one that
            ends the process by default does not.
        signal_grace_s: seconds between a signal and the kill that follows it: 30 with Kubernetes
            and Slurm as they come, 120 with SageMaker; None where it is not known.
        services: names among "aws", "gcp" and "azure" that are there; "auto" looks which one
            answers within a second, in the background; none by default.
        urls: address of each service by name; else TRADEWIND_METADATA_URL_AWS (_GCP, _AZURE), else
            TRADEWIND_METADATA_URL, else the service's own.

    Raises ValueError for an unknown service or an address that is not http://HOST[:PORT].
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = SIGNALS,
        *,
        signal_grace_s: float | None = 30.0,
        services: Sequence[str] | Literal["auto"] = (),
        urls: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        found = services_of(services, urls or {}, os.environ if environ is None else environ)
        self._pid = os.getpid()
        self._grace_s = signal_grace_s
        self._of_signal: Notice | None = None
        self._of_service: Notice | None = None
        self._soft: Notice | None = None
        self._previous: dict[int, Any] = {}
        self._is_closed = False
        self._handler = _handler_of(weakref.ref(self))
        self._stopping = threading.Event()
        self._services = found
        self._threads = [
            threading.Thread(
                target=_watch,
                args=(service, services == "auto", self._stopping, weakref.WeakMethod(self._take)),
                name=f"tradewind-notices-{service.name}",
                daemon=True,
            )
            for service in found
        ]
        _living.add(self)
        self._install(signals)
        for thread in self._threads:
            thread.start()

    @property
    def handles_signals(self) -> bool:
        return bool(self._previous)

    def notice(self) -> Notice | None:
        """What was noticed so far: the one whose deadline comes first, or the first without any; a
        soft one only where there is no other."""
        found = [notice for notice in (self._of_signal, self._of_service) if notice is not None]
        if not found:
            return self._soft
        return min(found, key=_urgency)

    def acknowledge_soft(self) -> None:
        """The checkpoint that a soft notice asked for is made: it is not told again."""
        self._soft = None

    def close(self) -> None:
        """End the threads and give the signals back. May be called again; from a thread that may
        not set signals, the handlers stay and pass on what comes."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        _living.discard(self)
        self._give_back()
        self._stopping.set()
        for service in self._services:
            service.close()
        until = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Notices:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- signals ----------------------------------------------------------------------------------

    def _install(self, signals: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals:
            # A handler that was not set from Python cannot be called from it, nor put back.
            if signal.getsignal(number) is not None:
                self._previous[number] = signal.signal(number, self._handler)

    def _give_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) is self._handler:  # else somebody came after us
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        if self._is_closed or os.getpid() != self._pid:
            _act_as(previous, number, frame)
            return
        if self._of_signal is None:
            now = time.monotonic()
            deadline = None if self._grace_s is None else now + self._grace_s
            self._of_signal = Notice(signal.Signals(number).name, now, deadline)
        if callable(previous):
            previous(number, frame)

    # --- services ---------------------------------------------------------------------------------

    def _take(self, finding: Finding) -> None:
        """From a service's thread; each service has its own, and one is there at a time."""
        notice = Notice(finding.kind, finding.at_s, finding.deadline_s, finding.is_soft)
        if notice.is_soft:
            self._soft = notice
            return
        before = self._of_service
        if before is None or _urgency(notice) < _urgency(before):
            self._of_service = notice


def _urgency(notice: Notice) -> float:
    return float("inf") if notice.deadline_s is None else notice.deadline_s


def _handler_of(of: weakref.ref[Notices]) -> Callable[[int, FrameType | None], None]:
    """The handler does not keep its Notices alive; without it, the signal acts as by default."""

    def handle(number: int, frame: FrameType | None) -> None:
        notices = of()
        if notices is None:
            _act_as(signal.SIG_DFL, number, frame)
        else:
            notices._handle(number, frame)

    return handle


def _act_as(previous: Any, number: int, frame: FrameType | None) -> None:
    """Do what a signal would have done without us."""
    if callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _watch(
    service: Service, must_probe: bool, stopping: threading.Event, take: weakref.WeakMethod[Any]
) -> None:
    if must_probe and not service.probe():
        return
    while not stopping.is_set():
        began = time.monotonic()
        for finding in service.ask():
            tell = take()
            if tell is None:
                return
            tell(finding)
            del tell
        # A service that answers only when something changes is asked again at once, but never more
        # often than this, whatever it answers.
        stopping.wait(max(service.poll_s - (time.monotonic() - began), service.poll_s / 10))


def _in_child() -> None:
    for notices in list(_living):
        notices._give_back()
        notices._is_closed = True
        _living.discard(notices)


os.register_at_fork(after_in_child=_in_child)
