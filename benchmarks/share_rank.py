"""One rank of a measurement: takes every contender's turns and writes what it saw. Started by
share_launch.py, never by hand."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measuring import keep_freed_memory
from share_contenders import CONTENDERS
from share_costs import measure_costs
from share_net import Sleeps
from share_stepper import Rank, Stepper

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# Until the others' turn has failed by its own timeout.
CONTROL_TIMEOUT = timedelta(seconds=300)
# DDP rebuilds its buckets after its first step, PowerSGD compresses from its third.
LEAD_IN_STEPS = 3
# From still to steady: what a step leaves to the next one is there before the clock starts.
RUN_IN_STEPS = 1


class Turns:
    """All ranks take the same turns: they agree after each one whether the contender stays."""

    def __init__(self, rank: Rank, steps: int, interface: str | None, now: Path) -> None:
        self.rank = rank
        self.steps = steps
        self._now = now  # whose turn it is: all that is left of it if it ends the process
        self.control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        self.unavailable: dict[str, str] = {}
        self.figures: dict[str, dict[str, list[float]]] = {}
        self._counters = Path(f"/sys/class/net/{interface}/statistics") if interface else None

    def take(self, name: str, *, counts: bool) -> None:
        """One turn; what it saw is kept where it `counts`."""
        self._now.write_text(name)
        reason, seen = None, {}
        try:
            seen = self._measure(name)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        reasons: list[str | None] = [None] * self.rank.count
        dist.all_gather_object(reasons, reason, group=self.control)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            self.unavailable[name] = reason
            self.figures.pop(name, None)
        elif counts:
            kept = self.figures.setdefault(name, {})
            for figure, value in seen.items():
                kept.setdefault(figure, []).append(value)

    def _measure(self, name: str) -> dict[str, float]:
        stepper = CONTENDERS[name].make(self.rank)
        try:
            return self._drive(stepper)
        finally:
            stepper.close()

    def _drive(self, stepper: Stepper) -> dict[str, float]:
        for _ in range(LEAD_IN_STEPS):
            stepper.step()
        bytes_before = self._still(stepper)
        for _ in range(RUN_IN_STEPS):
            stepper.step()
        cpu_began, began = time.process_time(), time.perf_counter()
        for _ in range(self.steps):
            stepper.step()
        taken, cpu_taken = time.perf_counter() - began, time.process_time() - cpu_began
        bytes_after = self._still(stepper)
        seen = {"step_s": taken / self.steps, "cpu_s": cpu_taken / self.steps}
        for direction, count in bytes_after.items():
            sent = count - bytes_before[direction]
            seen[f"{direction}_bytes"] = sent / (RUN_IN_STEPS + self.steps)
        return seen

    def _still(self, stepper: Stepper) -> dict[str, int]:
        """The interface's counters when nothing is under way on any rank."""
        stepper.settle()
        dist.barrier(group=self.control)
        if self._counters is None:
            return {}
        directions = {"sent": "tx_bytes", "received": "rx_bytes"}
        return {x: int((self._counters / file).read_text()) for x, file in directions.items()}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    sleeps = Sleeps(**task["sleeps"]) if task["sleeps"] else None
    rank = Rank(dist.get_rank(), dist.get_world_size(), sleeps)
    turns = Turns(rank, task["steps"], task["interface"], Path(task["now"]))
    costs = measure_costs(rank)
    # The first round is not kept: it finds out who can take part.
    for turn in range(1 + task["repeats"]):
        names = [name for name in task["names"] if name not in turns.unavailable]
        for name in names if turn % 2 == 0 else reversed(names):
            turns.take(name, counts=turn > 0)
        if rank.index == 0:
            print(f"  round {turn} of {task['repeats']}", file=sys.stderr, flush=True)
    return {"figures": turns.figures, "unavailable": turns.unavailable, "costs": costs}


def main() -> None:
    task = json.loads(sys.argv[1])
    # Dies with who started it: a rank left behind would keep its namespace.
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if task["core"] is not None:
        os.sched_setaffinity(0, {task["core"]})
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method="env://", timeout=COLLECTIVE_TIMEOUT)
    document = measure(task)
    Path(task["out"]).write_text(json.dumps(document))
    dist.barrier()
    # Groups that a contender broke may not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
