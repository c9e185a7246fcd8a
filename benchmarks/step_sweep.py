"""The sweep by itself, on gradients that lie in memory: against the machine's limit, by storage and
by rule."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from foreach_rules import ForeachLAMB, ForeachLion
from step_layouts import LAYOUTS, Shapes, gpt2_small, make_parameters, num_elements
from torch import nn

import tradewind as tw
from measuring import compile_stream, interleave, rates, ratios, summary

SWEEP_BYTES = 28  # AdamW: read parameter, gradient, two states; write all but the gradient; float32
Step = Callable[[], object]


def stream_candidates(count: int) -> dict[str, Step]:
    """Loops with the sweep's reads and writes, and with the norm's read (stream.cpp)."""
    stream = compile_stream()
    arrays = [torch.randn(count) for _ in range(4)]
    pointers = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
    threads = torch.get_num_threads()

    def update(_keep: object = arrays) -> None:
        stream.stream_update(*pointers, ctypes.c_int64(count), threads)

    def read(_keep: object = arrays) -> None:
        stream.stream_read(pointers[1], ctypes.c_int64(count), threads)

    return {"stream_update": update, "stream_read": read}


def measure_limit(repeats: int) -> dict[str, Any]:
    """AdamW float32 against the stream of its bytes, and the norm against a read."""
    results = {}
    for name, make in LAYOUTS.items():
        shapes = make()
        bare = tw.optim.AdamW(make_parameters(shapes), lr=1e-4)
        measuring = tw.optim.AdamW(make_parameters(shapes), lr=1e-4)

        def norm(optimizer: Any = measuring) -> None:
            optimizer.native_table.collect()
            optimizer.native_table.measure()

        candidates: dict[str, Step] = {
            "sweep": bare.step,
            "norm": norm,
            "torch_fused": torch.optim.AdamW(make_parameters(shapes), lr=1e-4, fused=True).step,
            **stream_candidates(num_elements(shapes)),
        }
        seconds = interleave(candidates, repeats)
        moved = num_elements(shapes) * SWEEP_BYTES
        results[name] = {
            **{f"{key}_s": summary(values) for key, values in seconds.items()},
            "sweep_fraction_of_stream": ratios(seconds["stream_update"], seconds["sweep"]),
            "norm_fraction_of_stream": ratios(seconds["stream_read"], seconds["norm"]),
            "speedup_over_torch_fused": ratios(seconds["torch_fused"], seconds["sweep"]),
            "sweep_rate_GBps": rates(seconds["sweep"], moved),
            "stream_rate_GBps": rates(seconds["stream_update"], moved),
            "moved_bytes": moved,
        }
    return results


# (dtype of parameters, options), and the bytes that a step of AdamW moves per element: gradient and
# parameter in their dtype, master and states as stored, each but the gradient read and written. A
# parameter with a float32 master is only written; 8-bit exponents are left out.
STORAGES: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "fp32": (torch.float32, {}, 4 + 3 * 8),
    "fp32, state bf16": (torch.float32, {"state_dtype": "bf16"}, 4 + 8 + 2 * 4),
    "fp32, state 8bit": (torch.float32, {"state_dtype": "8bit"}, 4 + 8 + 2 * 2),
    "bf16, fp32 master": (torch.bfloat16, {"masters": "fp32"}, 2 + 2 + 8 + 2 * 8),
    "bf16, split master": (torch.bfloat16, {"masters": "split"}, 2 + 4 + 4 + 2 * 8),
    "bf16, split, state bf16": (
        torch.bfloat16, {"masters": "split", "state_dtype": "bf16"}, 2 + 4 + 4 + 2 * 4,
    ),
    "bf16, split, state 8bit": (
        torch.bfloat16, {"masters": "split", "state_dtype": "8bit"}, 2 + 4 + 4 + 2 * 2,
    ),
    "fp16, fp32 master": (torch.float16, {"masters": "fp32"}, 2 + 2 + 8 + 2 * 8),
}  # fmt: skip


def measure_storages(repeats: int) -> dict[str, Any]:
    """One tensor of 64M elements, by storage; bytes kept per parameter counted on the tensors."""
    shapes = LAYOUTS["one 64M"]()
    count = num_elements(shapes)
    candidates: dict[str, Step] = {}
    kept: dict[str, float] = {}
    for name, (dtype, options, _) in STORAGES.items():
        parameters = make_parameters(shapes, dtype)
        optimizer = tw.optim.AdamW(parameters, lr=1e-4, **options)
        optimizer.step()
        kept[name] = stored_bytes(parameters, optimizer) / count
        candidates[name] = optimizer.step
    parameters = make_parameters(shapes, torch.bfloat16)
    candidates["torch fused, all bf16"] = torch.optim.AdamW(parameters, lr=1e-4, fused=True).step
    candidates |= {"stream_update": stream_candidates(count)["stream_update"]}
    seconds = interleave(candidates, repeats)
    results: dict[str, Any] = {}
    for name, values in seconds.items():
        moved = count * (STORAGES[name][2] if name in STORAGES else 14 if "bf16" in name else 28)
        results[name] = {
            "step_s": summary(values),
            "rate_GBps": rates(values, moved),
            "ratio_to_fp32": ratios(seconds["fp32"], values),
            "moved_bytes": moved,
        }
        if name in kept:
            results[name]["kept_bytes_per_parameter"] = kept[name]
    return results


def stored_bytes(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    states = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(p.nbytes for p in parameters) + sum(t.nbytes for t in states if t.ndim > 0)


def rule_candidates(shapes: Shapes) -> dict[str, tuple[Step, Step, float]]:
    """By rule: ours, the fastest there is in torch, and the bytes a step moves per element."""

    def fresh() -> list[nn.Parameter]:
        return make_parameters(shapes)

    optim, peers = tw.optim, torch.optim
    return {
        "SGD, Nesterov": (
            optim.SGD(fresh(), lr=1e-4, momentum=0.9, nesterov=True).step,
            peers.SGD(fresh(), lr=1e-4, momentum=0.9, nesterov=True, fused=True).step,
            20,
        ),
        "Lion": (
            optim.Lion(fresh(), lr=1e-4, weight_decay=0.1).step,
            ForeachLion(fresh(), lr=1e-4, weight_decay=0.1).step,
            20,
        ),
        "LAMB": (
            optim.LAMB(fresh(), lr=1e-4, weight_decay=0.1).step,
            ForeachLAMB(fresh(), lr=1e-4, weight_decay=0.1).step,
            24 + 16,  # the direction is worked out twice: for its norm and for the update
        ),
        "Adam, AMSGrad": (
            optim.Adam(fresh(), lr=1e-4, amsgrad=True).step,
            peers.Adam(fresh(), lr=1e-4, amsgrad=True, fused=True).step,
            36,
        ),
        "Adagrad": (
            optim.Adagrad(fresh(), lr=1e-4).step,
            peers.Adagrad(fresh(), lr=1e-4, fused=True).step,
            20,
        ),
        "RMSprop": (
            optim.RMSprop(fresh(), lr=1e-4).step,
            peers.RMSprop(fresh(), lr=1e-4, foreach=True).step,
            20,
        ),
    }


def measure_rules(repeats: int) -> dict[str, Any]:
    """Each rule against torch's fused optimizer or, where it has none, a foreach version."""
    results: dict[str, Any] = {}
    for layout, shapes in {
        "GPT-2 small, 148": gpt2_small(),
        "3,000 x 1k": [(1024,)] * 3000,
    }.items():
        rules = rule_candidates(shapes)
        candidates = {f"{name} ours": pair[0] for name, pair in rules.items()}
        candidates |= {f"{name} torch": pair[1] for name, pair in rules.items()}
        seconds = interleave(candidates, repeats)
        results[layout] = {
            name: {
                "step_s": summary(seconds[f"{name} ours"]),
                "torch_s": summary(seconds[f"{name} torch"]),
                "speedup_over_torch": ratios(seconds[f"{name} torch"], seconds[f"{name} ours"]),
                "rate_GBps": rates(seconds[f"{name} ours"], num_elements(shapes) * pair[2]),
                "moved_bytes": num_elements(shapes) * pair[2],
            }
            for name, pair in rules.items()
        }
        del rules, candidates
    return results
