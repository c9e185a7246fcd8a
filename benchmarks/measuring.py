"""How every benchmark here measures: candidates interleaved in one process, medians and ratios, the
machine described beside them."""

from __future__ import annotations

import ctypes
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Figure = dict[str, float]


def summary(values: list[float]) -> Figure:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int,
    warmups: int = 2,
    prepare: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each run of each candidate, in rounds A B C, C B A, so that drift is shared.

    What `prepare` has for a candidate runs before each of its runs, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(warmups + repeats):
        for name in names if turn % 2 == 0 else reversed(names):
            if prepare is not None and name in prepare:
                prepare[name]()
            began = time.perf_counter()
            candidates[name]()
            taken = time.perf_counter() - began
            if turn >= warmups:
                seconds[name].append(taken)
    return seconds


def ratios(numerator: list[float], denominator: list[float]) -> Figure:
    """Summary of the ratio, round by round."""
    return summary([a / b for a, b in zip(numerator, denominator, strict=True)])


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, as tcmalloc and jemalloc do: fresh pages for each backward's
    gradients, which the kernel must clear, would drown what is measured. For every candidate."""
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


def rates(seconds: list[float], num_bytes: float) -> Figure:
    """GB/s at which so many bytes were moved."""
    return summary([num_bytes / value / 1e9 for value in seconds])


def machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    from tradewind._core import native

    return {
        "cpu": model,
        "architecture": platform.machine(),
        "threads": torch.get_num_threads(),
        "isa": native.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def compile_stream() -> ctypes.CDLL:
    """The loops of stream.cpp, compiled for this machine."""
    source = Path(__file__).with_name("stream.cpp")
    library = Path(tempfile.mkdtemp()) / "stream.so"
    flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffast-math"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.stream_read.restype = ctypes.c_double
    return loaded


def table(rows: list[list[str]]) -> str:
    """Rows as a Markdown table; the first is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def show(results: dict[str, Any], rows: list[list[str]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=2))
        return
    print("machine: " + ", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    print()
    print(table(rows))


def text(figure: Figure, scale: float = 1.0, digits: int = 2) -> str:
    low, high = figure["min"] * scale, figure["max"] * scale
    return f"{figure['median'] * scale:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
