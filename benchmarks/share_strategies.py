"""How a bucket's mean comes about, as messages on the model's link (share_events.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from share_events import Callback, Core, Link, Priority

# Bytes on the wire per byte of float32 gradient; int8 with a scale of 4 bytes for 512 values.
WIRE_FRACTION = {"none": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 512)}


@dataclass
class Fabric:
    """What a rank shares through. The network link is its host's; `local` joins a host's ranks."""

    core: Core
    network: Link
    local: Link
    num_ranks: int
    ranks_per_host: int
    sum_s_per_byte: float
    wire_cpu_s_per_byte: float

    def send(
        self, num_bytes: float, priority: Priority, arrived: Callback, num_messages: int = 1
    ) -> None:
        """Over the network, with the core's part in sending and receiving."""
        self.core.take(num_bytes * self.wire_cpu_s_per_byte)
        self.network.send(num_bytes, priority, arrived, num_messages)


Strategy = Callable[[Fabric, float, Priority, Callback], None]


def ring(fabric: Fabric, num_bytes: float, priority: Priority, done: Callback) -> None:
    """All-reduce in a ring of all ranks: 2(N-1) rounds of an Nth, the first half summed. Of a
    host's ranks one sends out of it in a round."""
    _rounds(fabric, fabric.num_ranks, num_bytes, priority, done)


def _rounds(
    fabric: Fabric, count: int, num_bytes: float, priority: Priority, done: Callback
) -> None:
    part = num_bytes / count
    left = 2 * (count - 1)

    def arrived() -> None:
        nonlocal left
        left -= 1
        if left >= count - 1:
            fabric.core.process(part * fabric.sum_s_per_byte, go_on)
        else:
            go_on()

    def go_on() -> None:
        if left:
            fabric.send(part, priority, arrived)
        else:
            done()

    go_on()


def direct(fabric: Fabric, num_bytes: float, priority: Priority, done: Callback) -> None:
    """Every rank sends every other its shard, sums its own and sends that to all. The ranks of a
    host share its link."""
    others = fabric.num_ranks - 1
    outside = fabric.num_ranks - min(fabric.ranks_per_host, fabric.num_ranks)
    sent = num_bytes * fabric.ranks_per_host * outside / fabric.num_ranks
    summed = num_bytes * others / fabric.num_ranks
    messages = outside * fabric.ranks_per_host

    def scattered() -> None:
        fabric.core.process(summed * fabric.sum_s_per_byte, gather)

    def gather() -> None:
        fabric.send(sent, priority, done, messages)

    fabric.send(sent, priority, scattered, messages)


def hierarchical(fabric: Fabric, num_bytes: float, priority: Priority, done: Callback) -> None:
    """Reduce-scatter within the host, a ring of the hosts for each rank's shard, all-gather within
    the host."""
    ranks = fabric.ranks_per_host
    local_bytes = num_bytes * (ranks - 1) / ranks

    def scattered() -> None:
        fabric.core.process(local_bytes * fabric.sum_s_per_byte, between)

    def between() -> None:
        # The shards' rings run at once over the host's link: together all of the bucket's bytes.
        _rounds(fabric, fabric.num_ranks // ranks, num_bytes, priority, gather)

    def gather() -> None:
        fabric.local.send(local_bytes, priority, done)

    fabric.local.send(local_bytes, priority, scattered)


STRATEGIES: dict[str, Strategy] = {
    "ring": ring,
    "direct": direct,
    "hierarchical": hierarchical,
}
