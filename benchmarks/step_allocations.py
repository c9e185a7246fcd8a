"""What a steady step allocates: clipping and AdamW float32 on GPT-2 small, gradients given.

Each candidate runs in a process of its own, with malloc and pages as they are by default. Its
seconds are no measure: see the other sections.

    python benchmarks/step_allocations.py CANDIDATE   what the section runs
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from typing import Any

import torch

import tradewind as tw
from layouts import CLIP_NORM, LAYOUTS, Values
from measuring import Run, summary, text
from step_sweep import PEERS, clip_and_step

TITLE = "Allocations of a steady step, GPT-2 small with clipping"
NUM_STEPS = 20
CASE = "GPT-2 small, 148"


def candidates() -> list[str]:
    return ["tradewind", *PEERS]


def make(candidate: str) -> Run:
    parameters = Values(LAYOUTS[CASE]()).parameters_with_gradients()
    if candidate == "tradewind":
        return tw.optim.AdamW(parameters, lr=1e-4, clip_norm=CLIP_NORM).step
    return clip_and_step(parameters, **PEERS[candidate])


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def observe(step: Run) -> dict[str, Any]:
    """Page faults, torch's allocations and Python's of steps after the fifth."""
    for _ in range(5):
        step()
    gc.collect()
    faults = [0.0] * NUM_STEPS
    blocks = sys.getallocatedblocks()
    for i in range(NUM_STEPS):
        before = page_faults()
        step()
        faults[i] = float(page_faults() - before)
    kept = (sys.getallocatedblocks() - blocks) / NUM_STEPS
    tracemalloc.start()
    step()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    step()
    python_bytes = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    sizes = [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.nbytes() > 0
    ]
    return {
        "page_faults_per_step": summary(faults),
        "tensor_allocations_per_step": len(sizes),
        "tensor_allocated_bytes_per_step": sum(sizes),
        "python_peak_bytes_per_step": python_bytes,
        "python_blocks_kept_per_step": kept,
    }


def measure(_repeats: int, _loops: ctypes.CDLL) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    figures = {}
    for candidate in candidates():
        command = [sys.executable, __file__, candidate]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{candidate}: {done.stderr[-2000:]}")
        figures[candidate] = json.loads(done.stdout.splitlines()[-1])
    return {CASE: {"candidates": figures}}


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    (case,) = cases.values()
    rows = [
        [
            "per step",
            "page faults",
            "tensors allocated",
            "their MB",
            "Python's peak, kB",
            "Python blocks kept",
        ]
    ]
    for name, figures in case["candidates"].items():
        rows.append(
            [
                name,
                text(figures["page_faults_per_step"], digits=0),
                f"{figures['tensor_allocations_per_step']:,}",
                f"{figures['tensor_allocated_bytes_per_step'] / 1e6:,.3f}",
                f"{figures['python_peak_bytes_per_step'] / 1e3:.1f}",
                f"{figures['python_blocks_kept_per_step']:.2f}",
            ]
        )
    return [rows]


if __name__ == "__main__":
    print(json.dumps(observe(make(sys.argv[1]))))
