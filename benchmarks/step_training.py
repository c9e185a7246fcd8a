"""Whole training steps against a plain loop; what a steady step takes of memory and statistics."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step_layouts import CLIP_NORM, LAYOUTS, make_parameters
from torch import nn

import tradewind as tw
from measuring import interleave, ratios, summary
from tradewind.optim.fused import Orders

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

Batch = tuple[torch.Tensor, torch.Tensor]


def cases() -> dict[str, tuple[Callable[[], nn.Module], Batch]]:
    from cifar10 import make_model as cifar10
    from digits import make_model as digits
    from language_model import GPT

    torch.manual_seed(0)
    text = torch.randint(0, 65, (8, 129))
    return {
        "digits net": (digits, (torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))),
        "CIFAR net": (
            lambda: cifar10(10),
            (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))),
        ),
        "small GPT": (
            lambda: GPT(vocabulary=65, context=128, width=256, depth=6, heads=8),
            (text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        ),
    }


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def torch_step(model: nn.Module, batch: Batch, *, autocast: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = batch

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(inputs)
        loss_of(outputs, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure_training(repeats: int) -> dict[str, Any]:
    """The Engine against torch: AdamW, clipping, the same precision, forward to update."""
    results: dict[str, Any] = {}
    for name, (make, (inputs, targets)) in cases().items():
        for precision in ("fp32", "amp-bf16"):
            torch.manual_seed(1)
            engine = tw.Engine(make(), tw.AdamW(lr=1e-4), precision=precision, clip_norm=CLIP_NORM)
            torch.manual_seed(1)
            plain = torch_step(make(), (inputs, targets), autocast=precision == "amp-bf16")

            def ours(
                engine: tw.Engine = engine, inputs: Any = inputs, targets: Any = targets
            ) -> None:
                engine.step(loss_of(engine(inputs), targets))

            seconds = interleave({"engine": ours, "torch": plain}, repeats, warmups=5)
            results[f"{name}, {precision}"] = {
                "step_s": summary(seconds["engine"]),
                "torch_s": summary(seconds["torch"]),
                "speedup_over_torch": ratios(seconds["torch"], seconds["engine"]),
            }
            engine.close()
    return results


def measure_statistics(repeats: int) -> dict[str, Any]:
    """What knowing each parameter's numbers adds, as a fraction of a small GPT's whole step."""
    make, (inputs, targets) = cases()["small GPT"]
    engine = tw.Engine(make(), tw.AdamW(lr=1e-4), clip_norm=CLIP_NORM)
    names = {}
    for wants in (False, True):
        parameters = make_parameters([tuple(p.shape) for p in engine.model.parameters()])
        optimizer = tw.optim.AdamW(parameters, lr=1e-4, clip_norm=CLIP_NORM)

        def step(optimizer: Any = optimizer, wants: bool = wants) -> None:
            optimizer.order(Orders(measure=True, veto_nonfinite=True, wants_changes=wants))
            optimizer.step()

        names[f"update, statistics {'on' if wants else 'off'}"] = step
    names["whole step"] = lambda: engine.step(loss_of(engine(inputs), targets))
    seconds = interleave(names, repeats * 2, warmups=5)
    added = [
        on - off
        for on, off in zip(
            seconds["update, statistics on"], seconds["update, statistics off"], strict=True
        )
    ]
    return {
        "added_s": summary(added),
        "whole_step_s": summary(seconds["whole step"]),
        "fraction_of_step": ratios(added, seconds["whole step"]),
    }


def measure_memory(_repeats: int, steps: int = 20) -> dict[str, Any]:
    """Page faults of a steady step (AdamW float32 with clipping), GPT-2 small."""
    shapes = LAYOUTS["GPT-2 small, 148"]()
    results: dict[str, Any] = {}

    def count(name: str, step: Callable[[], object]) -> None:
        for _ in range(3):
            step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            step()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        results[f"{name}_page_faults_per_step"] = (after - before) / steps

    def torchs(**options: Any) -> Callable[[], object]:
        parameters = make_parameters(shapes)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)

        def step() -> None:
            nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()

        return step

    count("tradewind", tw.optim.AdamW(make_parameters(shapes), lr=1e-4, clip_norm=CLIP_NORM).step)
    count("torch_fused", torchs(fused=True))
    count("torch_foreach", torchs(foreach=True))
    return results
