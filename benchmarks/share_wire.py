"""The wire by itself: the gradients' bytes all-reduced with no step around, and through plain
sockets."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from share_net import num_elements
from share_stepper import Rank, Stepper, training


def _pieces(megabytes: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """As many elements as the gradients have, in pieces of so many MiB of float32."""
    flat = torch.zeros(num_elements(), dtype=dtype)
    return [flat] if megabytes is None else list(flat.split(megabytes * 2**20 // 4))


def wire(megabytes: int | None, dtype: torch.dtype = torch.float32) -> Callable[[Rank], Stepper]:
    """All-reduce of the gradients in pieces of this size, all of them in flight at once."""

    def make(rank: Rank) -> Stepper:
        group = rank.group("wire")
        pieces = _pieces(megabytes, dtype)

        def step() -> None:
            for work in [dist.all_reduce(x, group=group, async_op=True) for x in pieces]:
                work.wait()

        return Stepper(step)

    return make


def beside_compute(megabytes: int, dtype: torch.dtype) -> Callable[[Rank], Stepper]:
    """The step that shares nothing, with an all-reduce of as many bytes beside it that depends on
    nothing: all the overlap there is, and what it costs the core."""

    def make(rank: Rank) -> Stepper:
        group = rank.group("wire")
        pieces = _pieces(megabytes, dtype)
        task = rank.task()
        compute = training(task, task.model)

        def step() -> None:
            works = [dist.all_reduce(x, group=group, async_op=True) for x in pieces]
            compute()
            for work in works:
                work.wait()

        return Stepper(step)

    return make


def ring_of_sockets(rank: Rank) -> Stepper:
    """As many bytes as a ring all-reduce sends, to the next rank and from the one before: what one
    TCP connection each way gives, with nothing summed."""
    if rank.count < 2:
        raise ValueError("expected at least 2 ranks to send between, got 1")
    num_bytes = 2 * (rank.count - 1) * 4 * num_elements() // rank.count
    to_next, from_previous = _connect(rank)
    payload, received = bytearray(num_bytes), memoryview(bytearray(num_bytes))

    def receive() -> None:
        rest = received
        while rest:
            count = from_previous.recv_into(rest)
            if not count:
                raise ConnectionError("the rank before closed its connection")
            rest = rest[count:]

    def step() -> None:
        sender = threading.Thread(target=to_next.sendall, args=(payload,))
        sender.start()
        receive()
        sender.join()

    def close() -> None:
        to_next.close()
        from_previous.close()

    return Stepper(step, close=close)


def _connect(rank: Rank) -> tuple[socket.socket, socket.socket]:
    """Connections to the next rank and from the one before. Addresses travel over the group."""
    group = rank.group("wire")
    with socket.create_server((os.environ["SHARE_ADDRESS"], 0)) as server:
        server.settimeout(60)
        addresses: list[tuple[str, int] | None] = [None] * rank.count
        dist.all_gather_object(addresses, server.getsockname(), group=group)
        to_next = socket.create_connection(addresses[(rank.index + 1) % rank.count], timeout=60)
        from_previous, _ = server.accept()
    for connection in (to_next, from_previous):
        connection.settimeout(60)
    return to_next, from_previous
