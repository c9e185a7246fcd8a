"""The optimizer step on a GPU: AdamW with clipping, ours, torch's, and the machine's limit.

Candidates take turns in one process; times are of the device, by CUDA events, and of the host:
  tradewind bf16     bfloat16 parameters and gradients, float32 masters and states, norm and clip
  tradewind fp32     float32 throughout, norm and clip
  tradewind scaled   the same under torch.amp.GradScaler
  torch bf16         clip_grad_norm_ and fused AdamW over bfloat16 alone: no masters, states too
  torch fp32         clip_grad_norm_ and fused AdamW
  torch scaled       the same under torch.amp.GradScaler: unscale, clip, step, update
The limit is a triad, a = b + s * c, over as many bytes as the step reads and writes.

    python benchmarks/gpu_step.py [--json] [--repeats 20]

Prints "not measured" where no GPU answers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import tradewind as tw
from layouts import CLIP_NORM, LAYOUTS, Shapes
from measuring import figure_row, machine, ratios, show, summary

# Bytes per element of a step with its norm. With masters: gradient twice (2 + 2), master and two
# states read and written (12 + 12), parameter written (2). In float32: gradient twice (4 + 4),
# parameter and two states read and written (12 + 12).
BF16_BYTES = 30
FP32_BYTES = 32
WARM_UPS = 3

Step = Callable[[], object]


def timed(
    candidates: dict[str, Step], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds on the device and on the host, candidates in turn."""
    device: dict[str, list[float]] = {name: [] for name in candidates}
    host: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + WARM_UPS):
        for name, run in candidates.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            started = time.perf_counter()
            began.record()
            run()
            ended.record()
            taken = time.perf_counter() - started
            ended.synchronize()
            if turn >= WARM_UPS:
                device[name].append(began.elapsed_time(ended) / 1e3)
                host[name].append(taken)
    return device, host


def make_parameters(shapes: Shapes, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    parameters = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02)
        parameter.grad = torch.randn_like(parameter) * 0.01
        parameters.append(parameter)
    return parameters


def ours(shapes: Shapes, dtype: torch.dtype, **options: Any) -> tw.optim.AdamW:
    return tw.optim.AdamW(make_parameters(shapes, dtype), lr=1e-4, clip_norm=CLIP_NORM, **options)


def scaled(optimizer: torch.optim.Optimizer, *, unscale: bool) -> Step:
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device="cuda"))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step() -> None:
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def torch_candidate(shapes: Shapes, dtype: torch.dtype) -> Step:
    parameters = make_parameters(shapes, dtype)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()

    return step


def triad(num_bytes: int) -> Step:
    a, b, c = (torch.randn(num_bytes // 12, device="cuda") for _ in range(3))
    return lambda: torch.add(b, c, alpha=3.0, out=a)


def measure_layout(shapes: Shapes, repeats: int) -> dict[str, Any]:
    num_elements = sum(torch.Size(shape).numel() for shape in shapes)
    fp32 = torch.float32
    candidates: dict[str, Step] = {
        "tradewind_bf16": ours(shapes, torch.bfloat16, masters="fp32").step,
        "tradewind_fp32": ours(shapes, fp32).step,
        "tradewind_scaled": scaled(ours(shapes, fp32, fused=True), unscale=False),
        "torch_bf16": torch_candidate(shapes, torch.bfloat16),
        "torch_fp32": torch_candidate(shapes, fp32),
        "torch_scaled": scaled(
            torch.optim.AdamW(make_parameters(shapes, fp32), lr=1e-4, fused=True), unscale=True
        ),
        "limit_bf16": triad(num_elements * BF16_BYTES),
        "limit_fp32": triad(num_elements * FP32_BYTES),
    }
    device, host = timed(candidates, repeats)
    figures: dict[str, Any] = {f"{name}_s": summary(values) for name, values in device.items()}
    for name in ("tradewind_bf16", "tradewind_fp32", "torch_fp32", "torch_scaled"):
        figures[f"{name}_host_s"] = summary(host[name])
    for dtype, num_bytes in (("bf16", BF16_BYTES), ("fp32", FP32_BYTES)):
        seconds = device[f"tradewind_{dtype}"]
        limit = device[f"limit_{dtype}"]
        figures[f"{dtype}_fraction_of_limit"] = ratios(limit, seconds)
        rates = [num_elements * num_bytes / value / 1e9 for value in seconds]
        figures[f"{dtype}_rate_GBps"] = summary(rates)
    figures["fp32_speedup_over_torch"] = ratios(device["torch_fp32"], device["tradewind_fp32"])
    figures["scaled_speedup_over_torch"] = ratios(
        device["torch_scaled"], device["tradewind_scaled"]
    )
    # What mixed precision costs with each: torch's way keeps float32 parameters.
    figures["bf16_speedup_over_torch_scaled"] = ratios(
        device["torch_scaled"], device["tradewind_bf16"]
    )
    return figures


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
    rows = [["AdamW with clipping on the GPU", *layouts]]
    for key in next(iter(layouts.values())):
        rows.append(figure_row(key, [figures[key] for figures in layouts.values()]))
    show({"machine": facts, "layouts": layouts}, rows, as_json=options.json)


if __name__ == "__main__":
    main()
