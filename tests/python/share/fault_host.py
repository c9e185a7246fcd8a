"""Runs fault cases, several at once: each rank is a fork of this process, which has imported torch
already and runs nothing else. One case a line comes in; what became of its ranks goes out."""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import fault_ranks
import torch
import torch._dynamo  # what an optimizer's first use would import, in every rank

LIMIT_S = 25.0  # of a case: what takes longer hangs


class RunningCase:
    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.folder = Path(case["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began = time.time()
        self.pids: dict[int, int] = {}
        self.ended: dict[int, tuple[int, float]] = {}  # by rank: exit code, when

    def look(self) -> bool:
        """Whether every rank has ended."""
        now = time.time()
        for rank, pid in self.pids.items():
            if rank in self.ended:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.ended[rank] = (os.waitstatus_to_exitcode(status), now)
        alive = [rank for rank in self.pids if rank not in self.ended]
        fault = self.case["fault"] or {}
        if fault.get("kind") == "stop" and alive == [fault["rank"]]:
            how = signal.SIGCONT if fault["wakes"] else signal.SIGKILL
            os.kill(self.pids[fault["rank"]], how)
        if now > self.began + LIMIT_S:
            for rank in alive:
                os.kill(self.pids[rank], signal.SIGKILL)
        return not alive

    def outcome(self) -> dict[str, Any]:
        ranks = []
        for rank in self.pids:
            facts = json.loads((self.folder / f"{rank}.json").read_text())
            facts["exit"], facts["ended"] = self.ended[rank]
            facts["stderr"] = (self.folder / f"{rank}.err").read_text()[-3000:]
            ranks.append(facts)
        return {"name": self.case["name"], "began": self.began, "ranks": ranks}


def start(case: dict[str, Any]) -> RunningCase | int:
    """The case, or, in a child, its rank."""
    running = RunningCase(case)
    for rank in range(case["size"]):
        pid = os.fork()
        if pid == 0:
            errors = os.open(running.folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT, 0o600)
            for descriptor in (1, 2):
                os.dup2(errors, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return rank
        running.pids[rank] = pid
    return running


def serve() -> tuple[dict[str, Any], int] | None:
    """Until there are no more cases; in a child, returns at once what it is to be."""
    running: list[RunningCase] = []
    pending = b""
    is_open = True
    while is_open or running:
        ready, _, _ = select.select([0] if is_open else [], [], [], 0.02)
        if ready:
            read = os.read(0, 65536)
            is_open = bool(read)
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                case = json.loads(line)
                started = start(case)
                if isinstance(started, int):
                    return case, started
                running.append(started)
        for case_ in [case_ for case_ in running if case_.look()]:
            running.remove(case_)
            print(json.dumps(case_.outcome()), flush=True)
    return None


def run(case: dict[str, Any], rank: int) -> None:
    try:
        fault_ranks.run_rank(case, rank, Path(case["folder"]))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if case["whole_exit"]:
            raise
        # As the interpreter has it, up to where modules are taken apart.
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        os._exit(1)


if __name__ == "__main__":
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.freeze()  # so that children share its pages
    duty = serve()
    if duty is not None:
        run(*duty)
