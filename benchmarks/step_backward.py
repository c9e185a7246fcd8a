"""What clipping and stepping cost on top of backward, hooks included.

The graph is loss = sum of dot(parameter, input), so that backward writes each gradient anew, one
parameter after the other, as a network's does; forward runs outside the timed part, and gradients
are dropped outside it. A candidate's cost is its time less that of backward alone in the same
round: the mean of a run at either end of the round. Differences keep their sign; a ratio is taken
over the rounds in which ours is above 0 (`n` says how many), which drops only rounds in our favour.

  tradewind          tw.optim.AdamW(clip_norm=..., measure="backward")
  tradewind_scaler   the same with tw.GradScaler
  clip_fused         clip_grad_norm_ and torch.optim.AdamW(fused=True); _foreach, _default likewise
  scaler_fused       torch.amp.GradScaler: scale, unscale_, clip_grad_norm_, fused step, update
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

import tradewind as tw
from layouts import CLIP_NORM, LAYOUTS, Values
from measuring import Run, Stream, interleave, ratios_above_zero, summary, text
from step_sweep import PEERS, SWEEP_BYTES, clip_and_step
from traffic import bytes_moved

TITLE = "Clipping and AdamW float32 on top of backward"


class Candidate:
    """One set of parameters, its graph, and what is done with the gradients."""

    def __init__(self, values: Values) -> None:
        self.parameters = values.parameters()
        self._inputs = [gradient.view(-1) for gradient in values.gradients]
        self._loss: torch.Tensor | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.finish: Run = lambda: None

    def forward(self) -> None:
        pairs = zip(self.parameters, self._inputs, strict=True)
        self._loss = torch.stack([torch.dot(p.view(-1), x) for p, x in pairs]).sum()

    def backward(self) -> None:
        assert self._loss is not None
        loss = self._loss if self.scaler is None else self.scaler.scale(self._loss)
        loss.backward()

    def run(self) -> None:
        self.backward()
        self.finish()

    def drop(self) -> None:
        self._loss = None
        for parameter in self.parameters:
            parameter.grad = None


def ours(values: Values, *, with_scaler: bool = False) -> Candidate:
    candidate = Candidate(values)
    optimizer = tw.optim.AdamW(
        candidate.parameters, lr=1e-4, clip_norm=CLIP_NORM, measure="backward"
    )
    if not with_scaler:
        candidate.finish = optimizer.step
        return candidate
    scaler = candidate.scaler = tw.GradScaler("cpu")

    def finish() -> None:
        scaler.step(optimizer)
        scaler.update()

    candidate.finish = finish
    return candidate


def clipped(values: Values, options: dict[str, Any]) -> Candidate:
    candidate = Candidate(values)
    candidate.finish = clip_and_step(candidate.parameters, **options)
    return candidate


def scaled(values: Values) -> Candidate:
    candidate = Candidate(values)
    optimizer = torch.optim.AdamW(candidate.parameters, lr=1e-4, fused=True)
    scaler = candidate.scaler = torch.amp.GradScaler("cpu")

    def finish() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(candidate.parameters, CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()

    candidate.finish = finish
    return candidate


def bytes_of_finish(candidate: Candidate) -> int:
    candidate.forward()
    candidate.backward()
    moved = bytes_moved(candidate.finish)
    candidate.drop()
    return moved


def measure_layout(values: Values, repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    peers = {name: clipped(values, options) for name, options in PEERS.items()}
    peers["scaler_fused"] = scaled(values)
    own = {"tradewind": ours(values), "tradewind_scaler": ours(values, with_scaler=True)}
    bare = Candidate(values)
    stream = Stream(loops, values.num_elements)
    timed = {"backward_first": bare, **own, **peers}
    runs: dict[str, Run] = {name: candidate.run for name, candidate in timed.items()}
    seconds = interleave(
        {**runs, "stream_update": stream.update, "backward_last": bare.run},
        repeats,
        before={**{name: x.forward for name, x in timed.items()}, "backward_last": bare.forward},
        after={**{name: x.drop for name, x in timed.items()}, "backward_last": bare.drop},
    )
    ends = zip(seconds["backward_first"], seconds["backward_last"], strict=True)
    alone = [(first + last) / 2 for first, last in ends]
    costs = {
        name: [whole - part for whole, part in zip(seconds[name], alone, strict=True)]
        for name in (*own, *peers)
    }
    moved = {name: SWEEP_BYTES * values.num_elements for name in own}
    moved |= {name: bytes_of_finish(candidate) for name, candidate in peers.items()}
    figures: dict[str, Any] = {
        "num_elements": values.num_elements,
        "backward_s": summary(alone),
        # The noise that costs carry: two runs of the same thing in one round.
        "backward_last_less_first_s": summary(
            [
                b - a
                for a, b in zip(seconds["backward_first"], seconds["backward_last"], strict=True)
            ]
        ),
        "stream_update_s": summary(seconds["stream_update"]),
        "candidates": {
            name: {
                "time_s": summary(seconds[name]),
                "cost_s": summary(cost),
                "moved_bytes": moved[name],
            }
            for name, cost in costs.items()
        },
        "clipped_fraction_of_stream": ratios_above_zero(
            seconds["stream_update"], costs["tradewind"]
        ),
        "scaler_fraction_of_stream": ratios_above_zero(
            seconds["stream_update"], costs["tradewind_scaler"]
        ),
    }
    for peer in PEERS:
        figures[f"cost_ratio_{peer}"] = ratios_above_zero(costs[peer], costs["tradewind"])
    figures["cost_ratio_scaler_fused"] = ratios_above_zero(
        costs["scaler_fused"], costs["tradewind_scaler"]
    )
    return figures


def measure(repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    return {
        name: measure_layout(Values(shapes()), repeats, loops) for name, shapes in LAYOUTS.items()
    }


COSTS = {
    "tradewind": "tradewind",
    "clip_fused": "torch clip + fused",
    "clip_foreach": "torch clip + foreach",
    "clip_default": "torch clip + default",
    "tradewind_scaler": "tradewind with tw.GradScaler",
    "scaler_fused": "torch GradScaler, clip + fused",
}
RATIOS = {
    "cost_ratio_clip_fused": "cost of clip + fused over ours",
    "cost_ratio_clip_foreach": "cost of clip + foreach over ours",
    "cost_ratio_clip_default": "cost of clip + default over ours",
    "cost_ratio_scaler_fused": "cost of scaler, clip + fused over ours with scaler",
    "clipped_fraction_of_stream": "ours, fraction of stream (28 B)",
    "scaler_fraction_of_stream": "ours with scaler, fraction of stream (28 B)",
}


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    rows = [["milliseconds on top of backward", *cases]]
    for name, label in COSTS.items():
        costs = [case["candidates"][name]["cost_s"] for case in cases.values()]
        rows.append([label, *(text(cost, 1e3) for cost in costs)])
    for key, label in {
        "stream_update_s": "stream of 28 B per parameter",
        "backward_s": "(backward alone)",
        "backward_last_less_first_s": "(backward alone, last less first run of a round)",
    }.items():
        rows.append([label, *(text(case[key], 1e3) for case in cases.values())])
    for key, label in RATIOS.items():
        rows.append([label, *(text(case[key]) for case in cases.values())])
    moved = [["bytes moved per parameter", *cases]]
    for name, label in COSTS.items():
        each = [c["candidates"][name]["moved_bytes"] / c["num_elements"] for c in cases.values()]
        moved.append([label, *(f"{value:.1f}" for value in each)])
    return [rows, moved]
