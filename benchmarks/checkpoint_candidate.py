"""One candidate of checkpoint.py in a process of its own: NAME FOLDER GIGABYTES SAVES BATCH.

A net of linear layers whose parameters and AdamW state take GIGABYTES, trained on the CPU with
enough samples that a step takes about as long as the disk needs."""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

WIDTH = 2048
STATE_BYTES_PER_PARAMETER = 12  # float32 parameter and two moments
PLAIN_STEPS = 3


def make_net(gigabytes: float) -> torch.nn.Module:
    num_layers = max(round(gigabytes * 1e9 / STATE_BYTES_PER_PARAMETER / WIDTH**2), 1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
    with torch.no_grad():
        for layer in layers:
            torch.nn.init.orthogonal_(layer.weight[:64])
    return torch.nn.Sequential(*layers)


class Candidate(ABC):
    """Trains `net` in plain torch and saves in its own way into `folder`."""

    def __init__(self, net: torch.nn.Module, folder: Path, batch: int) -> None:
        self.net = net
        self.folder = folder
        self.inputs = torch.randn(batch, WIDTH)
        self.optimizer: Any = None
        self.num_saves = 0
        self.prepare()

    def prepare(self) -> None:
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=True)

    def step(self) -> None:
        self.net(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Tensors alone, by name: what every peer can hold."""
        named = {name: p.detach() for name, p in self.net.named_parameters()}
        moments = {
            f"{name}.{key}": self.optimizer.state[parameter][key]
            for name, parameter in self.net.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }
        return {**named, **moments}

    def target(self) -> Path:
        """Where this save goes; the one before the last is removed, as keep=2 would."""
        self.num_saves += 1
        shutil.rmtree(self.folder / str(self.num_saves - 2), ignore_errors=True)
        return self.folder / str(self.num_saves)

    @abstractmethod
    def save(self) -> None:
        """Returns as soon as training may go on."""

    def is_durable(self) -> bool:
        return True

    @abstractmethod
    def restore(self) -> None:
        """The newest save into the memory that is there."""

    def waited_s(self) -> float:
        """What updates waited for the last save."""
        return 0.0


def sync(path: Path) -> None:
    """What the library leaves out: the files, their folder and its name."""
    for each in (*(p for p in path.rglob("*")), path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class TorchSave(Candidate):
    def save(self) -> None:
        path = self.target()
        path.mkdir()
        torch.save(self.state(), path / "state.pt")
        sync(path)

    def restore(self) -> None:
        found = torch.load(self.folder / str(self.num_saves) / "state.pt", weights_only=True)
        self._take(found)

    def _take(self, found: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(found[name])


class Safetensors(TorchSave):
    def save(self) -> None:
        from safetensors.torch import save_file

        path = self.target()
        path.mkdir()
        save_file(self.state(), path / "state.safetensors")
        sync(path)

    def restore(self) -> None:
        from safetensors.torch import load_file

        self._take(load_file(self.folder / str(self.num_saves) / "state.safetensors"))


class Dcp(Candidate):
    def prepare(self) -> None:
        super().prepare()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=self.target())

    def restore(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state(), checkpoint_id=self.folder / str(self.num_saves))


class DcpAsync(Dcp):
    future: Any = None

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.future = dcp.async_save(self.state(), checkpoint_id=self.target())

    def is_durable(self) -> bool:
        return self.future is None or bool(self.future.done())


class TradewindEngine(Candidate):
    def prepare(self) -> None:
        import tradewind as tw

        self.engine = tw.Engine(
            self.net,
            tw.AdamW(lr=1e-5),
            checkpoint=tw.Checkpoint(
                path=self.folder / "engine", every=10**9, keep=2, notices="off"
            ),
        )
        self.handle: Any = None

    def step(self) -> None:
        self.engine.step(self.engine(self.inputs).square().mean())

    def save(self) -> None:
        self.num_saves += 1
        self.handle = self.engine.save()

    def is_durable(self) -> bool:
        return self.handle is None or bool(self.handle.is_done)

    def waited_s(self) -> float:
        self.handle.wait(600)
        return float(self.handle.waited_s)

    def restore(self) -> None:
        from tradewind.engine.restored_state import Restoring

        # What an Engine that finds a checkpoint does, without what it does once at its start.
        checkpointer = self.engine._checkpoints._checkpointer
        if checkpointer.load(into=Restoring(self.engine).into) is None:
            raise SystemExit("engine: expected a checkpoint, found none")


CANDIDATES: dict[str, type[Candidate]] = {
    "engine": TradewindEngine,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
}


def timed_step(candidate: Candidate) -> float:
    began = time.perf_counter()
    candidate.step()
    return time.perf_counter() - began


def save_while_training(candidate: Candidate, plain_s: float) -> dict[str, float]:
    began = time.perf_counter()
    candidate.save()
    stall_s = time.perf_counter() - began
    durable_s = [stall_s] if candidate.is_durable() else []
    watcher = threading.Thread(target=_watch, args=(candidate, began, durable_s), daemon=True)
    watcher.start()
    cost_s = stall_s
    while True:
        cost_s += timed_step(candidate) - plain_s
        if durable_s:
            break
    watcher.join()
    waited_s = candidate.waited_s()
    return {"stall_s": stall_s + waited_s, "cost_s": max(cost_s, 0.0), "durable_s": durable_s[0]}


def _watch(candidate: Candidate, began: float, found: list[float]) -> None:
    while not found:
        if candidate.is_durable():
            found.append(time.perf_counter() - began)
        time.sleep(0.002)


def save_idle(candidate: Candidate) -> float:
    began = time.perf_counter()
    candidate.save()
    while not candidate.is_durable():
        time.sleep(0.001)
    return time.perf_counter() - began


def resident_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}")


def drop_page_cache(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def touch_free_memory(num_bytes: int) -> None:
    """A host may back a guest's memory at its first touch alone, slowly: no restore's fault."""
    if num_bytes:
        torch.empty(num_bytes // 4).fill_(1.0)


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    gigabytes, saves, batch = float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    candidate = CANDIDATES[name](make_net(gigabytes), folder, batch)
    for _ in range(2):
        candidate.step()
    for _ in range(2):  # files to overwrite, buffers, code paths: as in the middle of a run
        save_idle(candidate)
        candidate.step()
    found: dict[str, list[float]] = {
        key: []
        for key in (
            "stall_s",
            "cost_s",
            "durable_s",
            "idle_s",
            "memory_bytes",
            "restore_s",
            "step_s",
        )
    }
    for _ in range(saves):
        plain = [timed_step(candidate) for _ in range(PLAIN_STEPS)]
        found["step_s"] += plain
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        for key, value in save_while_training(candidate, statistics.median(plain)).items():
            found[key].append(value)
        found["memory_bytes"].append(resident_bytes("VmHWM") - before)
        found["idle_s"].append(save_idle(candidate))
    for _ in range(saves):
        touch_free_memory(int(gigabytes * 1e9))
        drop_page_cache(folder)
        began = time.perf_counter()
        candidate.restore()
        found["restore_s"].append(time.perf_counter() - began)
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
