"""AdamW on one tensor of 64M in every format it may be stored in, without clipping; beside torch's
closest, fused AdamW in float32 and (without masters, which torch does not have) in bfloat16.

Bytes moved are arithmetic: what one pass has to read and write. Bytes stored are counted in the
tensors that are held, beside the arithmetic.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

import tradewind as tw
from layouts import Values
from measuring import Stream, interleave, ratios, text, timing
from traffic import bytes_moved, bytes_stored

TITLE = "AdamW in every format, one tensor of 64M"
NUM_ELEMENTS = 64 * 1024 * 1024
BLOCK = 256  # 8-bit numbers that share an exponent of one byte

_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0 + 1.0 / BLOCK}


@dataclass(frozen=True)
class Format:
    dtype: torch.dtype
    masters: Any = None
    state_dtype: Any = None

    @property
    def name(self) -> str:
        parts = [_SHORT[self.dtype]]
        parts += [f"{self.masters} masters"] if self.masters else []
        return f"{' + '.join(parts)}, states {self.state}"

    @property
    def state(self) -> str:
        if self.state_dtype is not None:
            return str(self.state_dtype)
        return "fp32" if self.masters else _SHORT[self.dtype]

    @property
    def master_bytes(self) -> float:
        return {None: 0.0, "fp32": 4.0, "split": 2.0}[self.masters]

    @property
    def stored_bytes(self) -> float:
        """Per parameter: itself, its master, two states."""
        return self.dtype.itemsize + self.master_bytes + 2 * _STATE_BYTES[self.state]

    @property
    def moved_bytes(self) -> float:
        """Per parameter: read its gradient; read and write the rest, but that a parameter beside a
        whole master is only written."""
        parameter = self.dtype.itemsize * (1 if self.masters == "fp32" else 2)
        return (
            self.dtype.itemsize
            + parameter
            + 2 * self.master_bytes
            + 2 * 2 * _STATE_BYTES[self.state]
        )


_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

FORMATS = [
    *(Format(torch.float32, None, state) for state in (None, "bf16", "8bit")),
    *(Format(torch.bfloat16, "fp32", state) for state in (None, "bf16", "8bit")),
    *(Format(torch.bfloat16, "split", state) for state in (None, "bf16", "8bit")),
    *(Format(torch.float16, "fp32", state) for state in (None, "bf16", "8bit")),
    Format(torch.bfloat16),
]


def measure(repeats: int, loops: ctypes.CDLL) -> dict[str, Any]:
    values = Values([(NUM_ELEMENTS,)])
    stream = Stream(loops, NUM_ELEMENTS)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for form in FORMATS:
        optimizers[form.name] = tw.optim.AdamW(
            values.parameters_with_gradients(form.dtype),
            lr=1e-4,
            masters=form.masters,
            state_dtype=form.state_dtype,
        )
    for dtype in (torch.float32, torch.bfloat16):
        optimizers[f"torch fused {_SHORT[dtype]}"] = torch.optim.AdamW(
            values.parameters_with_gradients(dtype), lr=1e-4, fused=True
        )
    seconds = interleave(
        {**{name: x.step for name, x in optimizers.items()}, "stream_update": stream.update},
        repeats,
    )
    arithmetic = {form.name: form for form in FORMATS}
    ours = seconds[FORMATS[0].name]
    candidates: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        form = arithmetic.get(name)
        moved = form.moved_bytes * NUM_ELEMENTS if form else bytes_moved(optimizer.step)
        # The bytes over the stream's rate, over the time: the rate as a fraction of the stream's.
        limit = [x * moved / stream.update_bytes for x in seconds["stream_update"]]
        stored = bytes_stored(optimizer.param_groups[0]["params"], optimizer)
        candidates[name] = {
            **timing(seconds[name], moved),
            "stored_bytes_per_parameter": stored / NUM_ELEMENTS,
            "expected_bytes_per_parameter": form.stored_bytes if form else None,
            "fraction_of_stream": ratios(limit, seconds[name]),
            "ratio_to_our_fp32": ratios(seconds[name], ours),
        }
    candidates["stream_update"] = timing(seconds["stream_update"], stream.update_bytes)
    return {"one 64M": {"num_elements": NUM_ELEMENTS, "candidates": candidates}}


def tables(cases: dict[str, Any]) -> list[list[list[str]]]:
    rows = [
        [
            "parameters and states",
            "milliseconds",
            "time over our fp32",
            "bytes moved per parameter",
            "GB/s",
            "fraction of stream",
            "bytes stored per parameter",
            "by arithmetic",
        ]
    ]
    (case,) = cases.values()
    for name, figures in case["candidates"].items():
        stored = figures.get("stored_bytes_per_parameter")
        expected = figures.get("expected_bytes_per_parameter")
        rows.append(
            [
                "stream of 28 B" if name == "stream_update" else name,
                text(figures["time_s"], 1e3),
                text(figures.get("ratio_to_our_fp32")),
                f"{figures['moved_bytes'] / case['num_elements']:.2f}",
                text(figures["rate_GBps"], digits=1),
                text(figures.get("fraction_of_stream")),
                "-" if stored is None else f"{stored:.2f}",
                "-" if expected is None else f"{expected:.2f}",
            ]
        )
    return [rows]
