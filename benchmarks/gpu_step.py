"""AdamW float32 on the GPU: ours, torch fused, and the same bytes as plain copies.

    python benchmarks/gpu_step.py [--json] [--repeats 20]

Prints "not measured" where no GPU answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from step import LAYOUTS, SWEEP_BYTES, Shapes

import tradewind as tw
from measuring import machine, ratios, show, summary, text


def timed(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds on the device by CUDA events, candidates taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 3):
        for name, run in candidates.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            ended.synchronize()
            if turn >= 3:
                seconds[name].append(began.elapsed_time(ended) / 1e3)
    return seconds


def make_parameters(shapes: Shapes) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def measure_layout(shapes: Shapes, repeats: int) -> dict[str, Any]:
    num_elements = sum(torch.Size(shape).numel() for shape in shapes)
    ours = tw.optim.AdamW(make_parameters(shapes), lr=1e-4)
    fused = torch.optim.AdamW(make_parameters(shapes), lr=1e-4, fused=True)
    # Three adds read six arrays and write three: 36 bytes against the sweep's 28, so the limit is
    # scaled by bytes.
    arrays = [torch.randn(num_elements, device="cuda") for _ in range(4)]

    def stream() -> None:
        for target in arrays[1:]:
            target.add_(arrays[0])

    seconds = timed({"tradewind": ours.step, "fused": fused.step, "stream": stream}, repeats)
    limit = [value * SWEEP_BYTES / 36 for value in seconds["stream"]]
    return {
        "tradewind_s": summary(seconds["tradewind"]),
        "fused_s": summary(seconds["fused"]),
        "limit_s": summary(limit),
        "speedup_over_fused": ratios(seconds["fused"], seconds["tradewind"]),
        "fraction_of_limit": ratios(limit, seconds["tradewind"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"gpu": "not measured"}) if options.json else "GPU: not measured")
        return
    layouts = {name: measure_layout(make(), options.repeats) for name, make in LAYOUTS.items()}
    facts = {**machine(), "gpu": torch.cuda.get_device_name(0)}
    rows = [["AdamW float32 on the GPU", *layouts]]
    for key in next(iter(layouts.values())):
        scale = 1e3 if key.endswith("_s") else 1
        label = key.replace("_s", ", ms") if key.endswith("_s") else key.replace("_", " ")
        rows.append([label, *(text(figures[key], scale, 3) for figures in layouts.values())])
    show({"machine": facts, "layouts": layouts}, rows, as_json=options.json)


if __name__ == "__main__":
    main()
