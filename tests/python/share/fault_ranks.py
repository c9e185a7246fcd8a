"""One rank of a fault case: trains a tiny model, does to itself what the case says, and writes what
became of it to a file. The case is data, see `test_faults.py`."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tradewind as tw

Case = dict[str, Any]
POISONED = "2.weight"  # the parameter whose gradient a "nan" fault spoils
NUM_STEPS = 5


class Fault:
    """What happens to this rank, at which phase of which step."""

    def __init__(self, case: Case, rank: int, report: Report) -> None:
        given = case["fault"] or {}
        self.is_mine = given.get("rank") == rank
        self.kind = given.get("kind", "")
        self.phase = given.get("phase", "")
        self.on_step = given.get("step", 0)
        self.seconds = given.get("seconds", 0.0)
        self.report = report
        self.step = 0

    def is_due(self, kind: str) -> bool:
        return self.is_mine and self.kind == kind and self.step == self.on_step

    def at(self, phase: str) -> None:
        if not self.is_mine or phase != self.phase or self.step != self.on_step:
            return
        self.report.note(fault_at=time.time())
        self.is_mine = False  # once
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "interrupt":
            # Whoever started the tests in the background may have had it ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
        elif self.kind == "raise":
            raise ValueError(f"made up in {phase}")
        elif self.kind == "exit":
            sys.exit(0)
        elif self.kind == "sleep":
            time.sleep(self.seconds)
        elif self.kind == "destroy-group":
            dist.destroy_process_group()


class Report:
    """What the test reads: kept in a file from the start, as a rank may be killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {"digests": {}, "warnings": [], "nonfinite": {}}
        self.note()

    def note(self, **facts: Any) -> None:
        self.facts.update(facts)
        self.path.write_text(json.dumps(self.facts))

    def digest(self, step: int, model: torch.nn.Module) -> None:
        found = hashlib.sha256()
        for tensor in model.parameters():
            found.update(tensor.detach().contiguous().numpy().tobytes())
        self.facts["digests"][str(step)] = found.hexdigest()
        self.note()


def make_model(case: Case, rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)  # different values are broadcast away
    is_odd = case["odd"] and rank == case["size"] - 1
    width = 9 if is_odd and case["odd"] == "width" else 16
    middle: list[torch.nn.Module] = [torch.nn.Linear(width, 16), torch.nn.Tanh()]
    if case["buffers"] or (is_odd and case["odd"] == "buffers"):
        middle.append(torch.nn.BatchNorm1d(16, affine=False))
    if case["odd"] == "running":
        middle.append(torch.nn.BatchNorm1d(16, affine=False, track_running_stats=is_odd))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.Tanh(), *middle, torch.nn.Linear(16, 4)
    )
    if is_odd and case["odd"] == "frozen":
        model[0].bias.requires_grad_(False)
    return model


def watch(model: torch.nn.Module, fault: Fault) -> None:
    """Puts the fault into the middle of forward and backward."""

    def in_forward(_module: torch.nn.Module, inputs: Any) -> None:
        fault.at("forward")
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _gradient: fault.at("backward"))

    model[2].register_forward_pre_hook(in_forward)
    poisoned = dict(model.named_parameters())[POISONED]

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * float("nan") if fault.is_due("nan") else None

    poisoned.register_hook(spoil)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def options(case: Case, rank: int) -> dict[str, Any]:
    given = {"codec": case["codec"], "bucket": 0.0005, "overlap": case["overlap"]}
    if rank == case["size"] - 1:
        given.update(case["odd_options"])
    return given


class SharingLoop:
    """GradientSharing with torch's optimizer."""

    def __init__(self, case: Case, rank: int, model: torch.nn.Module, report: Report) -> None:
        given = options(case, rank)
        self.clip = case["clip"]
        self.report = report
        self.model = model
        self.shared = tw.GradientSharing(
            model,
            codec=given["codec"],
            bucket_cap_mb=given["bucket"],
            timeout=timedelta(seconds=case["timeout"]),
            broadcast_buffers=given.get("broadcast_buffers"),
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self, fault: Fault, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.shared(x), y)
        fault.at("loss")
        if not fault.is_due("skip"):
            loss.backward()
        if fault.is_due("extra"):
            F.cross_entropy(self.shared(x), y).backward()
        fault.at("between")
        found = [[n.rank, n.parameter_name, n.microbatch] for n in self.shared.nonfinite]
        if found:
            self.report.facts["nonfinite"][str(fault.step)] = found
            self.optimizer.zero_grad()  # what a loop would do that looks
        if self.clip is not None and not found:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        fault.at("step")
        self.optimizer.step()
        self.report.digest(fault.step, self.model)

    def finish(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None: ...


class EngineLoop:
    def __init__(self, case: Case, rank: int, model: torch.nn.Module, report: Report) -> None:
        given = options(case, rank)
        self.report = report
        self.is_context = case["caught"]
        self.is_late = given["overlap"] != "backward"
        self.engine = tw.Engine(
            model,
            tw.AdamW(lr=1e-2),
            clip_norm=case["clip"],
            accumulate=case["accumulate"],
            share=tw.Share(
                codec=given["codec"],
                overlap=given["overlap"],
                bucket_mb=given["bucket"],
                timeout=timedelta(seconds=case["timeout"]),
                patience=timedelta(seconds=1),
                strategy=given.get("strategy", "allreduce"),
            ),
        )

    def step(self, fault: Fault, x: torch.Tensor, y: torch.Tensor) -> None:
        engine, sharing = self.engine, self.engine._sharing
        assert sharing is not None
        if "update" not in vars(sharing):
            update = sharing.update

            def faulty(*args: Any) -> Any:
                fault.at("step")
                return update(*args)

            vars(sharing)["update"] = faulty
        loss = F.cross_entropy(engine(x), y)
        fault.at("loss")
        if not fault.is_due("skip"):
            engine.backward(loss)
        if fault.is_due("extra"):
            engine.backward(F.cross_entropy(engine(x), y))
        fault.at("between")
        result = engine.step()
        if not self.is_late:
            self.report.digest(fault.step, engine.model)
        if fault.kind == "nan" and result.vetoed:
            found = [[n.rank, n.parameter_name, n.microbatch] for n in result.nonfinite]
            self.report.facts["nonfinite"][str(fault.step)] = found

    def finish(self) -> None:
        self.engine.settle()
        self.report.digest(NUM_STEPS, self.engine.model)

    def __enter__(self) -> None:
        if self.is_context:
            self.engine.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        sharing = self.engine._sharing
        if error is not None and sharing is not None and sharing._late is not None:
            # Half an update must not be read for a whole one.
            try:
                self.engine.model.state_dict()
                self.report.note(read_half="went on")
            except BaseException as refusal:
                self.report.note(read_half=type(refusal).__name__)
        if self.is_context:
            self.engine.__exit__(kind, error, traceback)


LOOPS = {"sharing": SharingLoop, "engine": EngineLoop}


def rendezvous(case: Case, rank: int, folder: Path) -> dist.Store:
    if case["store"] == "file":
        return dist.FileStore(str(folder / "store"), case["size"])
    wait = timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore(case["host"], 0, None, True, wait, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
        return store
    while not (folder / "port").exists():
        time.sleep(0.01)
    port = int((folder / "port").read_text())
    return dist.TCPStore(case["host"], port, None, False, wait)


def train(case: Case, rank: int, folder: Path, report: Report) -> None:
    store = rendezvous(case, rank, folder)
    # Much longer than any deadline of ours: a wait that forgets its own shows as a hang.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=case["size"], timeout=timedelta(seconds=300)
    )
    fault = Fault(case, rank, report)
    # torch's own start is not what is tested: a fault comes when all are through with it.
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < case["size"]:
        time.sleep(0.01)
    report.note(began=time.time())
    fault.at("start")
    model = make_model(case, rank)
    watch(model, fault)
    loop = LOOPS[case["api"]](case, rank, model, report)
    del store
    num_steps = NUM_STEPS
    if fault.is_mine and fault.kind == "short":
        num_steps = 3
    try:
        with loop:
            for step in range(1, num_steps + 1):
                fault.step = step
                time.sleep(case["pace"])
                fault.at("forward-begin")
                loop.step(fault, *batch(rank, step))
                report.note(num_steps=step)
            loop.finish()
    except ValueError:
        if not case["caught"]:
            raise
        time.sleep(2 * case["timeout"])  # the others know by then, though this process goes on
    if case["fork"]:
        use_in_child(loop, report)
    dist.barrier() if dist.is_initialized() and case["fault"] is None else None


def use_in_child(loop: Any, report: Report) -> None:
    """A child that was forked may not share with its parent's peers, and ends without a wait."""
    pid = os.fork()
    if pid == 0:
        try:
            x, y = batch(0, 1)
            call = loop.shared if isinstance(loop, SharingLoop) else loop.engine
            F.cross_entropy(call(x), y).backward()
            text = "went on"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        (report.path.parent / f"{report.path.stem}.child").write_text(text)
        del loop, call
        gc.collect()
        os._exit(7)
    begin = time.time()
    while time.time() < begin + 5:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            text = (report.path.parent / f"{report.path.stem}.child").read_text()
            report.note(child=[os.waitstatus_to_exitcode(status), text])
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    report.note(child=[None, "hung"])


def run_rank(case: Case, rank: int, folder: Path) -> None:
    """As a script would: what is raised here leaves the interpreter as it likes."""
    report = Report(folder / f"{rank}.json")

    def keep(message: Any, *_args: Any, **_kwargs: Any) -> None:
        report.facts["warnings"].append(str(message))

    warnings.showwarning = keep
    warnings.simplefilter("always", RuntimeWarning)
    try:
        train(case, rank, folder, report)
    except BaseException as error:
        report.note(outcome=type(error).__name__, text=str(error), told=time.time())
        raise
    report.note(outcome="fine", text="", told=time.time())


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
