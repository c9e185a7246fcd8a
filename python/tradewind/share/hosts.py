"""Which ranks share a host, and where those meet: what strategy="hierarchical" needs to know."""

from __future__ import annotations

import os
import secrets
import socket
import warnings
from collections import Counter
from pathlib import Path

from tradewind.share.rendezvous import Meeting


def host_key() -> str:
    """What is the same for ranks that can reach each other's memory, and for no others.

    `TRADEWIND_HOST_KEY`, or else the host's name, its boot and this process's network namespace, in
    which the sockets lie that memory is handed over by.
    """
    given = os.environ.get("TRADEWIND_HOST_KEY")
    if given:
        return given
    return f"{socket.gethostname()} {_boot_id()} {_network_namespace()}"


def meet_on_hosts(meeting: Meeting) -> tuple[list[str], list[str]]:
    """Each rank's host, and the name of the socket at which it meets the others there: none where
    there is nobody to meet, or where hosts have different numbers of ranks.

    Raises SharingError naming the ranks that are missing.
    """
    name = f"tradewind-{secrets.token_hex(16)}"
    found = meeting.tell_all("host", f"{name} {host_key()}")
    sockets, hosts = zip(*(text.split(" ", 1) for text in found), strict=True)
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        if meeting.rank == 0:
            numbers = ", ".join(map(str, counts.values()))
            warnings.warn(
                f"strategy='hierarchical': hosts have {numbers} ranks; every rank shares with all, "
                "as with strategy='allreduce'. Start as many ranks on each host",
                stacklevel=2,
            )
        return list(hosts), []
    return list(hosts), list(sockets) if len(counts) < meeting.size else []


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _network_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        return "unknown"
