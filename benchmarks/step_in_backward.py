"""A whole step of a transformer of 28M parameters, updated in backward or after it, float32, no
clipping (an update in backward cannot know the norm).

  in_backward     tw.Engine(update="in-backward")
  after_backward  tw.Engine
  fused           torch.optim.AdamW(fused=True), zero_grad(set_to_none=True)

The peak of gradients is sampled apart from the timing, each time one arrives: its bytes and those
of every `.grad` that is there, over those of all parameters.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

import tradewind as tw
from measuring import Run, interleave, ratios, summary, text
from models import Task, loss_of, transformer_task

TITLE = "Updating in backward: a whole step of a 28M transformer, float32"
CASE = "8 layers of width 512, 128 tokens"


def make_task() -> Task:
    return transformer_task(layers=8, width=512, vocabulary=2560, context=64, batch=2)


def engine_step(task: Task, update: str) -> Run:
    engine = tw.Engine(task.model, tw.AdamW(lr=1e-4), update=update)
    return lambda: engine.step(loss_of(engine(task.inputs), task.targets))


def torch_step(task: Task) -> Run:
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss_of(task.model(task.inputs), task.targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak_of_gradients(task: Task, step: Run) -> float:
    """The most bytes of gradients that live at once, as a fraction of all of them."""
    parameters = list(task.model.parameters())
    peak = 0

    def arrives(gradient: torch.Tensor) -> None:
        nonlocal peak
        living = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        peak = max(peak, living + gradient.nbytes)

    handles = [parameter.register_hook(arrives) for parameter in parameters]
    step()
    for handle in handles:
        handle.remove()
    return peak / sum(parameter.nbytes for parameter in parameters)


def measure(repeats: int, _loops: ctypes.CDLL) -> dict[str, Any]:
    tasks = {name: make_task() for name in ("in_backward", "after_backward", "fused")}
    steps = {
        "in_backward": engine_step(tasks["in_backward"], "in-backward"),
        "after_backward": engine_step(tasks["after_backward"], "after-backward"),
        "fused": torch_step(tasks["fused"]),
    }
    seconds = interleave(steps, repeats)
    parameters = [p.numel() for p in tasks["fused"].model.parameters()]
    case = {
        "num_elements": sum(parameters),
        "largest_parameter_fraction": max(parameters) / sum(parameters),
        "after_backward_over_in_backward": ratios(
            seconds["after_backward"], seconds["in_backward"]
        ),
        "fused_over_in_backward": ratios(seconds["fused"], seconds["in_backward"]),
        "fused_over_after_backward": ratios(seconds["fused"], seconds["after_backward"]),
        "candidates": {
            name: {
                "time_s": summary(seconds[name]),
                "peak_gradient_fraction": peak_of_gradients(tasks[name], steps[name]),
            }
            for name in steps
        },
    }
    return {CASE: case}


LABELS = {
    "in_backward": "Engine, in backward",
    "after_backward": "Engine, after backward",
    "fused": "torch fused",
}


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    (case,) = cases.values()
    rows = [["", "milliseconds", "peak of live gradients", "its time over in backward's"]]
    for name, figures in case["candidates"].items():
        rows.append(
            [
                LABELS[name],
                text(figures["time_s"], 1e3, 1),
                f"{figures['peak_gradient_fraction']:.1%}",
                text(case.get(f"{name}_over_in_backward")),
            ]
        )
    largest = f"{case['largest_parameter_fraction']:.1%}"
    rows.append(["(largest parameter)", "-", largest, "-"])
    return [rows]
