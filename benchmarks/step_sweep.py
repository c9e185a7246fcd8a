"""AdamW float32 with clipping, the gradients lying there: each pass against the machine's rate.

tradewind     tw.optim.AdamW(clip_norm=...): norm pass and sweep
clip_fused    torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW(fused=True)
clip_foreach  the same with foreach=True
clip_default  the same with torch's default
fused         torch.optim.AdamW(fused=True), no clipping
sweep, norm   our two passes alone
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

import tradewind as tw
from layouts import CLIP_NORM, LAYOUTS, Values
from measuring import Run, Stream, interleave, ratios, text, timing
from traffic import bytes_moved

TITLE = "AdamW float32 with clipping, gradients given"
SWEEP_BYTES = 28  # read parameter, gradient, two states; write parameter, two states
NORM_BYTES = 4

PEERS: dict[str, dict[str, Any]] = {
    "clip_fused": {"fused": True},
    "clip_foreach": {"foreach": True},
    "clip_default": {},
}


def clip_and_step(parameters: list[torch.nn.Parameter], **options: Any) -> Run:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()

    return step


def measure_layout(values: Values, repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    given = values.parameters_with_gradients
    measured = tw.optim.AdamW(given(), lr=1e-4)

    def norm() -> None:
        measured.native_table.collect()
        measured.native_table.measure()

    stream = Stream(loops, values.num_elements)
    ours: dict[str, tuple[Run, int]] = {
        "tradewind": (
            tw.optim.AdamW(given(), lr=1e-4, clip_norm=CLIP_NORM).step,
            SWEEP_BYTES + NORM_BYTES,
        ),
        "sweep": (tw.optim.AdamW(given(), lr=1e-4).step, SWEEP_BYTES),
        "norm": (norm, NORM_BYTES),
        "stream_update": (stream.update, SWEEP_BYTES),
        "stream_read": (stream.read, NORM_BYTES),
    }
    peers: dict[str, Run] = {
        **{name: clip_and_step(given(), **options) for name, options in PEERS.items()},
        "fused": torch.optim.AdamW(given(), lr=1e-4, fused=True).step,
    }
    seconds = interleave({**{name: run for name, (run, _) in ours.items()}, **peers}, repeats)
    moved = {name: num_bytes * values.num_elements for name, (_, num_bytes) in ours.items()}
    moved |= {name: bytes_moved(run) for name, run in peers.items()}
    figures: dict[str, Any] = {
        "num_elements": values.num_elements,
        "candidates": {name: timing(seconds[name], moved[name]) for name in seconds},
    }
    for peer in PEERS:
        figures[f"speedup_over_{peer}"] = ratios(seconds[peer], seconds["tradewind"])
    figures["sweep_fraction_of_stream"] = ratios(seconds["stream_update"], seconds["sweep"])
    figures["norm_fraction_of_stream"] = ratios(seconds["stream_read"], seconds["norm"])
    return figures


def measure(repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    return {
        name: measure_layout(Values(shapes()), repeats, loops) for name, shapes in LAYOUTS.items()
    }


TIMES = {
    "tradewind": "tradewind",
    "clip_fused": "torch clip + fused",
    "clip_foreach": "torch clip + foreach",
    "clip_default": "torch clip + default",
    "fused": "torch fused, no clip",
    "sweep": "our sweep alone",
    "norm": "our norm alone",
    "stream_update": "stream of the sweep's bytes",
}
RATIOS = {
    "speedup_over_clip_fused": "x faster than clip + fused",
    "speedup_over_clip_foreach": "x faster than clip + foreach",
    "speedup_over_clip_default": "x faster than clip + default",
    "sweep_fraction_of_stream": "sweep, fraction of stream",
    "norm_fraction_of_stream": "norm, fraction of a read stream",
}


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    rows = [["milliseconds", *cases]]
    for name, label in TIMES.items():
        times = [case["candidates"][name]["time_s"] for case in cases.values()]
        rows.append([label, *(text(time, 1e3) for time in times)])
    for key, label in RATIOS.items():
        rows.append([label, *(text(case[key]) for case in cases.values())])
    for name in ("sweep", "stream_update"):
        rates = [case["candidates"][name]["rate_GBps"] for case in cases.values()]
        rows.append([f"{TIMES[name]}, GB/s", *(text(rate, digits=1) for rate in rates)])
    return [rows]
