"""A discrete-event model of one rank's step: its core, its host's link, and an event queue.

All ranks do the same at the same time, so one stands for all: what it sends, its likes send at that
moment, and what arrives is what they sent. Time is in seconds, rates in bytes a second.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

Callback = Callable[[], None]
Priority = tuple[int, ...]


class Events:
    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callback]] = []
        self._order = itertools.count()

    def after(self, seconds: float, callback: Callback) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), callback))

    def run(self) -> None:
        while self._queue:
            self.now, _, callback = heapq.heappop(self._queue)
            callback()


@dataclass
class Link:
    """Sends one message at a time, the most urgent first (least priority), equals in order."""

    events: Events
    rate_Bps: float
    latency_s: float
    message_s: float = 0.0  # keeps the link busy for each message, beyond its bytes
    _waiting: list[tuple[Priority, int, float, Callback]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _is_busy: bool = False

    def send(
        self, num_bytes: float, priority: Priority, arrived: Callback, num_messages: int = 1
    ) -> None:
        busy_s = num_bytes / self.rate_Bps + num_messages * self.message_s
        heapq.heappush(self._waiting, (priority, next(self._order), busy_s, arrived))
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        _, _, busy_s, arrived = heapq.heappop(self._waiting)
        self._is_busy = True

        def sent() -> None:
            self._is_busy = False
            self.events.after(self.latency_s, arrived)
            self._next()

        self.events.after(busy_s, sent)


@dataclass
class Core:
    """Computes one thing at a time; sharing takes its time from what is being computed, or from
    nothing while the core waits."""

    events: Events
    idle_s: float = 0.0
    _ends: float = 0.0
    _is_busy: bool = False

    def compute(self, seconds: float, done: Callback) -> None:
        self.idle_s += self.events.now - self._ends
        self._is_busy = True
        self._ends = self.events.now + seconds
        self._check(done)

    def _check(self, done: Callback) -> None:
        ends = self._ends

        def reached() -> None:
            if self._ends > ends:
                self._check(done)
            else:
                self._is_busy = False
                done()

        self.events.after(ends - self.events.now, reached)

    def take(self, seconds: float) -> None:
        """Time for sharing, beside what is computed."""
        if self._is_busy:
            self._ends += seconds

    def process(self, seconds: float, done: Callback) -> None:
        """As `take`, for work whose result is waited for."""
        self.take(seconds)
        self.events.after(seconds, done)
