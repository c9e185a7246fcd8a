"""The optimizer step against its peers, on the CPU, float32 AdamW with clipping.

Candidates take turns in one process over the same layouts and gradients:
  tradewind       tw.optim.AdamW(clip_norm=...): norm pass and sweep
  clip+fused      torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW(fused=True)
  clip+foreach    the same with foreach=True
  clip+default    the same with torch's default
The limit is a loop with the sweep's four reads and three writes per element (stream.cpp).

    python benchmarks/step.py [--json] [--repeats 15]
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from typing import Any

import torch

import tradewind as tw
from measuring import compile_stream, interleave, machine, ratios, show, summary, text

SWEEP_BYTES = 28  # read parameter, gradient, two states; write parameter, two states; float32
CLIP_NORM = 0.5

Shapes = list[tuple[int, ...]]


def gpt2_small() -> Shapes:
    """The 148 parameters of GPT-2 small (124M; Radford et al., 2019), head tied."""
    width = 768
    block: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *(block * 12), (width,), (width,)]


LAYOUTS: dict[str, Callable[[], Shapes]] = {
    "one 64M": lambda: [(64 * 1024 * 1024,)],
    "GPT-2 small, 148": gpt2_small,
    "3,000 x 1k": lambda: [(1024,)] * 3000,
}


def make_parameters(shapes: Shapes) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
        parameter.grad = torch.randn(shape, generator=generator) * 0.01
        parameters.append(parameter)
    return parameters


def torch_candidate(shapes: Shapes, **options: Any) -> Callable[[], None]:
    parameters = make_parameters(shapes)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()

    return step


def stream_candidates(stream: ctypes.CDLL, num_elements: int) -> dict[str, Callable[[], object]]:
    arrays = [torch.randn(num_elements) for _ in range(4)]
    pointers = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
    count = ctypes.c_int64(num_elements)
    threads = torch.get_num_threads()

    def update(_keep: object = arrays) -> None:
        stream.stream_update(*pointers, count, threads)

    def read(_keep: object = arrays) -> None:
        stream.stream_read(pointers[1], count, threads)

    return {"stream_update": update, "stream_read": read}


def measure_layout(shapes: Shapes, repeats: int, stream: ctypes.CDLL) -> dict[str, Any]:
    num_elements = sum(torch.Size(shape).numel() for shape in shapes)
    parameters = make_parameters(shapes)
    clipped = tw.optim.AdamW(parameters, lr=1e-4, clip_norm=CLIP_NORM)
    bare = tw.optim.AdamW(make_parameters(shapes), lr=1e-4)
    vetoing = tw.optim.AdamW(make_parameters(shapes), lr=1e-4)

    def measure_only() -> None:
        vetoing.native_table.collect()
        vetoing.native_table.measure()

    candidates: dict[str, Callable[[], object]] = {
        "tradewind": clipped.step,
        "clip_fused": torch_candidate(shapes, fused=True),
        "clip_foreach": torch_candidate(shapes, foreach=True),
        "clip_default": torch_candidate(shapes),
        "sweep": bare.step,
        "norm": measure_only,
        "fused": _without_clip(shapes),
        **stream_candidates(stream, num_elements),
    }
    seconds = interleave(candidates, repeats)
    ours = seconds["tradewind"]
    figures: dict[str, Any] = {f"{name}_s": summary(values) for name, values in seconds.items()}
    for peer in ("clip_fused", "clip_foreach", "clip_default"):
        figures[f"speedup_over_{peer}"] = ratios(seconds[peer], ours)
    figures["sweep_fraction_of_stream"] = ratios(seconds["stream_update"], seconds["sweep"])
    figures["norm_fraction_of_stream"] = ratios(seconds["stream_read"], seconds["norm"])
    figures["sweep_rate_GBps"] = _rate(seconds["sweep"], num_elements * SWEEP_BYTES)
    figures["stream_rate_GBps"] = _rate(seconds["stream_update"], num_elements * SWEEP_BYTES)
    figures["num_parameters"] = len(shapes)
    figures["num_elements"] = num_elements
    return figures


def _without_clip(shapes: Shapes) -> Callable[[], object]:
    return torch.optim.AdamW(make_parameters(shapes), lr=1e-4, fused=True).step


def _rate(seconds: list[float], num_bytes: int) -> dict[str, float]:
    return summary([num_bytes / value / 1e9 for value in seconds])


def rows_of(layouts: dict[str, Any]) -> list[list[str]]:
    head = ["AdamW float32 with clipping, milliseconds", *layouts]
    lines = {
        "tradewind": ("tradewind_s", 1e3),
        "torch clip + fused": ("clip_fused_s", 1e3),
        "torch clip + foreach": ("clip_foreach_s", 1e3),
        "torch clip + default": ("clip_default_s", 1e3),
        "torch fused, no clip": ("fused_s", 1e3),
        "our sweep alone": ("sweep_s", 1e3),
        "our norm alone": ("norm_s", 1e3),
        "stream of the sweep's bytes": ("stream_update_s", 1e3),
        "x faster than clip + fused": ("speedup_over_clip_fused", 1),
        "x faster than clip + foreach": ("speedup_over_clip_foreach", 1),
        "x faster than clip + default": ("speedup_over_clip_default", 1),
        "sweep, fraction of stream": ("sweep_fraction_of_stream", 1),
        "norm, fraction of a read stream": ("norm_fraction_of_stream", 1),
        "sweep, GB/s": ("sweep_rate_GBps", 1),
        "stream, GB/s": ("stream_rate_GBps", 1),
    }
    return [
        head,
        *(
            [label, *(text(figures[key], scale) for figures in layouts.values())]
            for label, (key, scale) in lines.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    stream = compile_stream()
    layouts = {
        name: measure_layout(shapes(), options.repeats, stream) for name, shapes in LAYOUTS.items()
    }
    show({"machine": machine(), "layouts": layouts}, rows_of(layouts), as_json=options.json)


if __name__ == "__main__":
    main()
