"""A small training run with everything that must go on exactly: dropout, batch norm, shuffled data,
random augmentation, a schedule, an average. Runs as a script, too, to be killed."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tradewind as tw

EPOCHS, BATCH, SAMPLES = 3, 8, 56
STEPS = EPOCHS * SAMPLES // BATCH  # 21


class Lost(Exception):
    """Ends a run in the middle, as a crash would."""


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with noise that torch, numpy and Python draw."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
        self.y = torch.randint(0, 10, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(3, 8, 8) + np.random.normal() + random.gauss(0, 1)
        return self.x[index] + 0.1 * noise, self.y[index]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(8 * 36, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


RECIPES: dict[str, Any] = {
    "AdamW": lambda: tw.AdamW(lr=1e-2),
    "SGD": lambda: tw.SGD(lr=1e-2, momentum=0.9, nesterov=True),
    "LAMB": lambda: tw.LAMB(lr=1e-2),
    "Muon": lambda: tw.Muon(lr=1e-2),
}


def make_engine(folder: Path, recipe: str = "AdamW", every: Any = 10_000, **options: Any) -> Any:
    seed()
    return tw.Engine(
        net(),
        RECIPES[recipe](),
        checkpoint=tw.Checkpoint(path=folder, every=every, notices=options.pop("notices", "off")),
        **options,
    )


def seed() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def train(
    folder: Path,
    *,
    save_at: int | None = None,
    lose_at: int | None = None,
    at: dict[int, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train to the end, or until `lose_at`, which raises Lost. `save_at`: update to save after.
    `at`: what is called with the Engine after an update. Returns the final bits."""
    with make_engine(folder, **options) as engine:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=STEPS)
        average = torch.optim.swa_utils.AveragedModel(engine.model)
        engine.track(schedule=schedule, average=average)
        torch.rand(5), np.random.rand(), random.random()  # as a script may, before its loop
        loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True)
        seen = []
        for x, y in engine.batches(loader, epochs=EPOCHS, progress="off"):
            seen.append(float(x.sum()))
            result = engine.step(F.cross_entropy(engine(x), y))
            if result.applied or result.vetoed:
                schedule.step()
                average.update_parameters(engine.model)
                if engine.num_steps == save_at:
                    engine.save().wait(120)
                if engine.num_steps == lose_at:
                    raise Lost
                if at and engine.num_steps in at:
                    at[engine.num_steps](engine)
        found = {
            "state": to_bytes(engine.state_dict()),
            "random": to_bytes([torch.get_rng_state(), np.random.get_state(), random.getstate()]),
            "steps": engine.num_steps,
            "lr": engine.optimizer.param_groups[0]["lr"],
            "last batches": seen[-4:],
        }
    return found


def to_bytes(value: Any) -> Any:
    """Tensors by dtype, shape and bytes; everything else by repr."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {str(key): to_bytes(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_bytes(each) for each in value]
    return repr(value)


def differing(first: Any, second: Any, path: str = "") -> list[str]:
    """Where two results differ, so that a failure names it."""
    if isinstance(first, dict) and isinstance(second, dict) and set(first) == set(second):
        return [d for key in first for d in differing(first[key], second[key], f"{path}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [d for i, (a, b) in pairs for d in differing(a, b, f"{path}[{i}]")]
    return [] if first == second else [path]


def main() -> None:
    """FOLDER RESULT [SIGNAL STEP]: save every 3 updates; send the signal to itself at the step."""
    torch.set_num_threads(1)
    folder, result, *rest = sys.argv[1:]
    at = {}
    if rest:
        number = getattr(signal, rest[0])
        at[int(rest[1])] = lambda engine: os.kill(os.getpid(), number)
    found = train(Path(folder), every=3, at=at, notices="signals", run=f"{folder}-run")
    Path(result).write_bytes(pickle.dumps(found))
    print(json.dumps({"steps": found["steps"]}))


if __name__ == "__main__":
    main()
