"""Every other rule against the fastest that torch offers, float32, without clipping: its fused
optimizer where it has one, else the faster of its foreach and its plain loop; for Lion and LAMB,
which it does not have, the papers' formulas in its foreach operations (foreach_papers.py)."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from typing import Any

import torch

import tradewind as tw
from foreach_papers import ForeachLAMB, ForeachLion
from layouts import LAYOUTS, Values
from measuring import Stream, free_memory, interleave, ratios, text, timing
from traffic import bytes_moved

TITLE = "Other rules, gradients given"
Make = Callable[[list[torch.nn.Parameter]], Any]


def _torch(kind: Any, **options: Any) -> Make:
    return lambda parameters: kind(parameters, **options)


SGD = {"lr": 1e-4, "momentum": 0.9, "nesterov": True}
AMSGRAD = {"lr": 1e-4, "amsgrad": True}

# Name: (ours, bytes it moves per parameter, torch's). A sweep reads the gradient and reads and
# writes the parameter and each state. LAMB takes two, as it needs the norms of all directions of a
# parameter first: gradient, parameter and states read and states written; then parameter and states
# read and the parameter written.
RULES: dict[str, tuple[Make, int, dict[str, Make]]] = {
    "Lion": (
        _torch(tw.optim.Lion, lr=1e-4, weight_decay=0.1),
        20,
        {"foreach of the paper": _torch(ForeachLion, lr=1e-4, weight_decay=0.1)},
    ),
    "LAMB": (
        _torch(tw.optim.LAMB, lr=1e-4, weight_decay=0.01),
        40,
        {"foreach of the paper": _torch(ForeachLAMB, lr=1e-4, weight_decay=0.01)},
    ),
    "SGD Nesterov": (
        _torch(tw.optim.SGD, **SGD),
        20,
        {"torch fused": _torch(torch.optim.SGD, **SGD, fused=True)},
    ),
    "Adagrad": (
        _torch(tw.optim.Adagrad, lr=1e-4),
        20,
        {"torch fused": _torch(torch.optim.Adagrad, lr=1e-4, fused=True)},
    ),
    "RMSprop": (
        _torch(tw.optim.RMSprop, lr=1e-4),
        20,
        {
            "torch foreach": _torch(torch.optim.RMSprop, lr=1e-4, foreach=True),
            "torch loop": _torch(torch.optim.RMSprop, lr=1e-4, foreach=False),
        },
    ),
    "Adam AMSGrad": (
        _torch(tw.optim.Adam, **AMSGRAD),
        36,
        {"torch fused": _torch(torch.optim.Adam, **AMSGRAD, fused=True)},
    ),
}
SHOWN = ("GPT-2 small, 148", "3,000 x 1k")


def measure_rule(rule: str, values: Values, repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    ours, num_bytes, peers = RULES[rule]
    given = values.parameters_with_gradients
    stream = Stream(loops, values.num_elements)
    steps = {name: make(given()).step for name, make in {"tradewind": ours, **peers}.items()}
    seconds = interleave({**steps, "stream_update": stream.update}, repeats)
    fastest = min(peers, key=lambda name: statistics.median(seconds[name]))
    moved = {name: bytes_moved(steps[name]) for name in peers}
    moved["tradewind"] = num_bytes * values.num_elements
    moved["stream_update"] = stream.update_bytes
    limit = [x * moved["tradewind"] / stream.update_bytes for x in seconds["stream_update"]]
    return {
        "num_elements": values.num_elements,
        "peer": fastest,
        "speedup": ratios(seconds[fastest], seconds["tradewind"]),
        "fraction_of_stream": ratios(limit, seconds["tradewind"]),
        "candidates": {name: timing(seconds[name], moved[name]) for name in seconds},
    }


def measure(repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for layout in SHOWN:
        values = Values(LAYOUTS[layout]())
        for rule in RULES:
            cases[f"{rule}: {layout}"] = measure_rule(rule, values, repeats, loops)
            free_memory()
    return cases


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    rows = [["rule: layout", "ours, ms", "peer, ms", "x faster", "fraction of stream", "peer"]]
    for name, case in cases.items():
        rows.append(
            [
                name,
                text(case["candidates"]["tradewind"]["time_s"], 1e3),
                text(case["candidates"][case["peer"]]["time_s"], 1e3),
                text(case["speedup"]),
                text(case["fraction_of_stream"]),
                case["peer"],
            ]
        )
    return [rows]
