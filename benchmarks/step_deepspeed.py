"""DeepSpeed's CPUAdam with the same clipping, where it is installed (it is no dependency of ours):
`pip install deepspeed`; its operator is compiled on first use.

  tradewind   tw.optim.AdamW(clip_norm=...)
  clip_cpu    torch.nn.utils.clip_grad_norm_ and deepspeed.ops.adam.DeepSpeedCPUAdam
  sweep, cpu  the same without clipping
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any

import torch

import tradewind as tw
from layouts import CLIP_NORM, LAYOUTS, Values
from measuring import Run, Stream, free_memory, interleave, ratios, text, timing
from step_sweep import NORM_BYTES, SWEEP_BYTES

TITLE = "DeepSpeed's CPUAdam, float32 with clipping, gradients given"


def measure_layout(kind: Any, values: Values, repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    given = values.parameters_with_gradients
    options = {"lr": 1e-4, "weight_decay": 1e-2}
    parameters = given()
    theirs = kind(parameters, adamw_mode=True, **options)

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        theirs.step()

    stream = Stream(loops, values.num_elements)
    runs: dict[str, tuple[Run, int]] = {
        "tradewind": (
            tw.optim.AdamW(given(), clip_norm=CLIP_NORM, **options).step,
            SWEEP_BYTES + NORM_BYTES,
        ),
        # The clipping reads the gradients, then reads and writes them.
        "clip_cpu": (clip_and_step, SWEEP_BYTES + 3 * NORM_BYTES),
        "sweep": (tw.optim.AdamW(given(), **options).step, SWEEP_BYTES),
        "cpu": (kind(given(), adamw_mode=True, **options).step, SWEEP_BYTES),
        "stream_update": (stream.update, SWEEP_BYTES),
    }
    seconds = interleave({name: run for name, (run, _) in runs.items()}, repeats)
    return {
        "num_elements": values.num_elements,
        "speedup_over_clip_cpu": ratios(seconds["clip_cpu"], seconds["tradewind"]),
        "speedup_over_cpu": ratios(seconds["cpu"], seconds["sweep"]),
        "candidates": {
            name: timing(seconds[name], num_bytes * values.num_elements)
            for name, (_, num_bytes) in runs.items()
        },
    }


def measure(repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    try:
        # What it prints while it loads is no part of our output.
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed
            from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    cases = {"version": deepspeed.__version__}
    for name, shapes in LAYOUTS.items():
        with contextlib.redirect_stdout(sys.stderr):
            cases[name] = measure_layout(DeepSpeedCPUAdam, Values(shapes()), repeats, loops)
        free_memory()
    return cases


LABELS = {
    "tradewind": "tradewind",
    "clip_cpu": "clip + CPUAdam",
    "sweep": "our sweep alone",
    "cpu": "CPUAdam alone",
    "stream_update": "stream of the sweep's bytes",
}


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    if not cases:
        return [[["DeepSpeed"], ["not installed"]]]
    layouts = {name: case for name, case in cases.items() if name != "version"}
    rows = [[f"milliseconds (DeepSpeed {cases['version']})", *layouts]]
    for name, label in LABELS.items():
        times = [case["candidates"][name]["time_s"] for case in layouts.values()]
        rows.append([label, *(text(time, 1e3) for time in times)])
    for key, label in {
        "speedup_over_clip_cpu": "x faster than clip + CPUAdam",
        "speedup_over_cpu": "sweep, x faster than CPUAdam alone",
    }.items():
        rows.append([label, *(text(case[key]) for case in layouts.values())])
    return [rows]
