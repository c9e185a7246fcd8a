"""Whole training steps: forward, backward, clipping, AdamW, gradients dropped; a plain torch loop
against tw.Engine, in float32 and with bfloat16 autocast.

  engine   tw.Engine(clip_norm=...): engine.step(loss)
  torch    autocast, loss.backward(), clip_grad_norm_, AdamW(fused=True), zero_grad(set_to_none)

And what the numbers behind `engine.stats()` cost: our optimizer's step with them less without, as a
fraction of the Engine's whole step.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import torch

import tradewind as tw
from layouts import CLIP_NORM
from measuring import Run, free_memory, interleave, ratios, summary, text
from models import Task, cifar_task, digits_task, loss_of, transformer_task
from tradewind.optim.fused import Orders

TITLE = "Whole training steps"


def gpt_task() -> Task:
    return transformer_task(layers=6, width=256, vocabulary=512, context=128, batch=4)


TASKS: dict[str, Callable[[], Task]] = {
    "digits net": digits_task,
    "conv net, batch norm, 32x32": cifar_task,
    "GPT, 5M": gpt_task,
}
PRECISIONS = ("fp32", "amp-bf16")


def engine_step(task: Task, precision: str) -> Run:
    engine = tw.Engine(task.model, tw.AdamW(lr=1e-4), precision=precision, clip_norm=CLIP_NORM)
    return lambda: engine.step(loss_of(engine(task.inputs), task.targets))


def torch_step(task: Task, precision: str) -> Run:
    parameters = list(task.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    has_autocast = precision == "amp-bf16"

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_autocast):
            loss = loss_of(task.model(task.inputs), task.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def optimizer_step(task: Task, *, wants_changes: bool) -> Run:
    model = copy.deepcopy(task.model)
    loss_of(model(task.inputs), task.targets).backward()
    optimizer = tw.optim.AdamW(model.parameters(), lr=1e-4, clip_norm=CLIP_NORM)

    def step() -> None:
        optimizer.order(Orders(measure=True, veto_nonfinite=True, wants_changes=wants_changes))
        optimizer.step()

    return step


def measure_task(make: Callable[[], Task], precision: str, repeats: int) -> dict[str, Any]:
    seconds = interleave(
        {
            "engine": engine_step(make(), precision),
            "torch": torch_step(make(), precision),
            "step_with_stats": optimizer_step(make(), wants_changes=True),
            "step_without_stats": optimizer_step(make(), wants_changes=False),
        },
        repeats,
        warmups=5,
    )
    changes = zip(seconds["step_with_stats"], seconds["step_without_stats"], strict=True)
    return {
        "num_elements": sum(p.numel() for p in make().model.parameters()),
        "speedup": ratios(seconds["torch"], seconds["engine"]),
        "stats_fraction_of_step": ratios([a - b for a, b in changes], seconds["engine"]),
        "candidates": {name: {"time_s": summary(values)} for name, values in seconds.items()},
    }


def measure(repeats: int, _loops: ctypes.CDLL) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name, make in TASKS.items():
        for precision in PRECISIONS:
            # Short steps: twice the rounds.
            cases[f"{name}, {precision}"] = measure_task(make, precision, 2 * repeats)
            free_memory()
    return cases


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    rows = [["", "parameters", "Engine, ms", "torch, ms", "x faster", "statistics, % of a step"]]
    for name, case in cases.items():
        candidates = case["candidates"]
        rows.append(
            [
                name,
                f"{case['num_elements']:,}",
                text(candidates["engine"]["time_s"], 1e3),
                text(candidates["torch"]["time_s"], 1e3),
                text(case["speedup"], digits=3),
                text(case["stats_fraction_of_step"], 100),
            ]
        )
    return [rows]
