"""Starts the ranks of one measurement, on hosts of their own or on this one, and collects what they
wrote."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from share_hosts import INTERFACE, Hosts
from share_net import Sleeps

RANK_SCRIPT = Path(__file__).with_name("share_rank.py")
# Inside hosts of its own no port is taken.
PORT = 29500


@dataclass
class Measurement:
    names: list[str]
    steps: int
    repeats: int
    num_hosts: int = 1
    ranks_per_host: int = 1
    rate_Gbps: float | None = None  # None: the loopback of this host, not shaped
    sleeps: Sleeps | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host


class RankEnded(RuntimeError):
    """A rank ended before it wrote its figures, in the turn of `contender` if that is known."""

    def __init__(self, reason: str, contender: str | None) -> None:
        super().__init__(reason)
        self.contender = contender


def run(measurement: Measurement) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What each rank wrote, in rank order; and who ended a rank's process, with the reason. The
    others are then measured anew without it."""
    ended: dict[str, str] = {}
    while True:
        try:
            return _run_on_hosts(measurement), ended
        except RankEnded as error:
            if error.contender is None:
                raise
            print(f"{error.contender}: {error}; going on without it", file=sys.stderr)
            ended[error.contender] = str(error)
            names = [name for name in measurement.names if name not in ended]
            measurement = replace(measurement, names=names)


def _run_on_hosts(measurement: Measurement) -> list[dict[str, Any]]:
    if measurement.rate_Gbps is None:
        return _run_ranks(measurement, None)
    with Hosts(measurement.num_hosts, measurement.rate_Gbps) as hosts:
        return _run_ranks(measurement, hosts)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _cores(num_ranks: int) -> list[int | None]:
    """A core each where there are exactly as many as ranks."""
    cores = sorted(os.sched_getaffinity(0))
    return [*cores] if len(cores) == num_ranks else [None] * num_ranks


def _start(
    measurement: Measurement, hosts: Hosts | None, rank: int, port: int, core: int | None, out: Path
) -> subprocess.Popen[bytes]:
    host, local_rank = divmod(rank, measurement.ranks_per_host)
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(measurement.num_ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(measurement.ranks_per_host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1",
        "MASTER_PORT": str(port),
        "SHARE_ADDRESS": hosts.address(host) if hosts else "127.0.0.1",
        "GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns that a namespace has no host names
        **measurement.environment,
    }
    task = {
        "names": measurement.names,
        "steps": measurement.steps,
        "repeats": measurement.repeats,
        "sleeps": asdict(measurement.sleeps) if measurement.sleeps else None,
        # The loopback's counters have both ranks' bytes in one.
        "interface": INTERFACE if hosts else None,
        "core": core,
        "out": str(out),
        "now": str(_now(out)),
    }
    command = [sys.executable, str(RANK_SCRIPT), json.dumps(task)]
    return subprocess.Popen(hosts.command(host, command) if hosts else command, env=environment)


def _now(out: Path) -> Path:
    return out.with_suffix(".now")


def _run_ranks(measurement: Measurement, hosts: Hosts | None) -> list[dict[str, Any]]:
    port = PORT if hosts else _free_port()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(measurement.num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, core in enumerate(_cores(measurement.num_ranks)):
                ranks.append(_start(measurement, hosts, rank, port, core, outs[rank]))
            _wait(ranks, outs)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads(out.read_text()) for out in outs]


def _wait(ranks: list[subprocess.Popen[bytes]], outs: list[Path]) -> None:
    """Until all have ended well; the first that does not ends the measurement."""
    going = True
    while going:
        time.sleep(0.2)
        going = any(process.poll() is None for process in ranks)
        for rank, process in enumerate(ranks):
            if process.returncode:
                now = _now(outs[rank])
                raise RankEnded(
                    f"rank {rank} ended with {_ending(process.returncode)}",
                    now.read_text() if now.exists() else None,
                )


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
