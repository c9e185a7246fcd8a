"""A steady step takes no new memory: no tensor is allocated and no page is touched for the first
time. (The native half's own allocations are counted in tests/cpp/step/allocation_test.cpp.)"""

from __future__ import annotations

import gc
import resource
from typing import Any

import pytest
import torch
from torch import nn

import tradewind as tw

STEPS = 20
SHAPES = [(300, 1000), (1000,), (17, 3, 5), (0,), (1 << 18,)]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"clip_norm": 1.0}),
    ("AdamW", {"clip_norm": 1.0, "state_dtype": "8bit"}),
    ("AdamW", {"clip_norm": 1.0, "masters": "split", "state_dtype": "bf16"}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("LAMB", {"clip_norm": 1.0}),
    ("Lion", {}),
]


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize(("rule", "options"), CASES)
def test_no_memory_is_taken(rule: str, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "masters" in options else torch.float32
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = getattr(tw.optim, rule)(parameters, **options)
    for _ in range(3):
        optimizer.step()
    gc.collect()
    gc.disable()
    try:
        with torch.profiler.profile(profile_memory=True) as profile:
            for _ in range(2):
                optimizer.step()
        allocated = [event for event in profile.events() if event.cpu_memory_usage > 0]
        before = page_faults()
        for _ in range(STEPS):
            optimizer.step()
        faults = page_faults() - before
    finally:
        gc.enable()
    assert allocated == []
    # The interpreter touches a page of its own now and then. torch's clip and foreach step fault
    # more than twice a step here.
    assert faults <= STEPS // 4
