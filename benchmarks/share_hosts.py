"""Hosts of their own network on one machine: namespaces joined by links that `tc` keeps to a rate.

Two hosts are the ends of one veth pair; more are joined by a bridge in a namespace of its own. Both
ends of every link are shaped, so each direction has the rate. Above about 5 Gb/s the cores are the
limit, not the link.
"""

from __future__ import annotations

import os
import shutil
import subprocess

INTERFACE = "wire"
_PREFIX = "tw-share-"
_BURST = "512kb"  # far below a step's bytes, so that it hides nothing
_LATENCY = "20ms"


def why_unavailable() -> str | None:
    """Why links cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"not found: {', '.join(missing)} (package iproute2)" if missing else None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _is_alive(process_id: str) -> bool:
    try:
        os.kill(int(process_id), 0)
    except (ValueError, ProcessLookupError):
        return False
    return True


def remove_left_over() -> None:
    """Remove the namespaces of runs that were killed before they could."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(_PREFIX) and not _is_alive(name.removeprefix(_PREFIX).split("-")[0]):
            _run("ip", "netns", "del", name)


class Hosts:
    """A context in which `count` hosts exist; who enters it ends their processes before leaving."""

    def __init__(self, count: int, rate_Gbps: float) -> None:
        self.count = count
        self._rate = f"{round(rate_Gbps * 1000)}mbit"
        self._names = [f"{_PREFIX}{os.getpid()}-{host}" for host in range(count)]
        self._switch = f"{_PREFIX}{os.getpid()}-switch"
        self._made: list[str] = []

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """`command`, to be run on the host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def __enter__(self) -> Hosts:
        remove_left_over()
        try:
            for name in self._names:
                self._make(name)
            if self.count == 2:
                self._join(self._names[0], INTERFACE, self._names[1], INTERFACE)
            else:
                self._join_by_switch()
            for host, name in enumerate(self._names):
                address = f"{self.address(host)}/24"
                _run("ip", "-n", name, "addr", "add", address, "dev", INTERFACE)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self, name: str) -> None:
        self._made.append(name)
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        # Gloo takes an interface's first address, which may be an IPv6 one that is not ready yet.
        off = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"
        _run("ip", "netns", "exec", name, "sh", "-c", f"test ! -d /proc/sys/net/ipv6 || {off}")

    def _join(self, first: str, first_end: str, second: str, second_end: str) -> None:
        peer = ["peer", "name", second_end, "netns", second]
        _run("ip", "link", "add", first_end, "netns", first, "type", "veth", *peer)
        for name, end in ((first, first_end), (second, second_end)):
            _run("ip", "-n", name, "link", "set", end, "up")
            shape = ["root", "tbf", "rate", self._rate, "burst", _BURST, "latency", _LATENCY]
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, *shape)

    def _join_by_switch(self) -> None:
        self._make(self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self._names):
            self._join(name, INTERFACE, self._switch, f"port{host}")
            _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def _remove(self) -> None:
        for name in self._made:
            # One that will not go must not keep the others.
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        self._made = []
